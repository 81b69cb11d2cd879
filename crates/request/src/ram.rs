//! How much of this computer's memory a search may take, and how much it took, as Linux tells it.

use std::fs::read_to_string;

/// The memory limit of a search where the free memory is unknown.
const UNKNOWN: u64 = 2 << 30;

/// Half of the memory that is free.
pub fn half_of_free() -> u64 {
    free().map_or(UNKNOWN, |free| free / 2)
}

/// The memory that is free: of the computer, of the group of processes that this one is limited with, and of the address
/// space that this process may use (`ulimit -v`).
pub fn free() -> Option<u64> {
    let computer = read_to_string("/proc/meminfo").ok().and_then(|text| kilobytes(&text, "MemAvailable:"));
    let number = |name: &str| read_to_string(name).ok()?.trim().parse::<u64>().ok();
    let group = number("/sys/fs/cgroup/memory.max")
        .zip(number("/sys/fs/cgroup/memory.current"))
        .map(|(most, used)| most.saturating_sub(used));
    computer.into_iter().chain(group).chain(free_addresses()).min()
}

/// Bytes of address space that this process may still map.
fn free_addresses() -> Option<u64> {
    let limits = read_to_string("/proc/self/limits").ok()?;
    let line = limits.lines().find_map(|line| line.strip_prefix("Max address space"))?;
    let most = line.split_whitespace().next()?.parse::<u64>().ok()?;
    let used = kilobytes(&read_to_string("/proc/self/status").ok()?, "VmSize:")?;
    Some(most.saturating_sub(used))
}

/// The most memory that this process has held at once.
pub fn most_held() -> Option<u64> {
    kilobytes(&read_to_string("/proc/self/status").ok()?, "VmHWM:")
}

/// The number behind a name, in bytes.
fn kilobytes(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn linux_tells_what_is_free_and_what_is_held() {
        let text = "VmPeak:\t  123 kB\nVmHWM:\t    2048 kB\nVmRSS: 7 pages\n";
        assert_eq!(kilobytes(text, "VmHWM:"), Some(2 << 20));
        assert_eq!((kilobytes(text, "VmRSS:"), kilobytes(text, "VmSwap:")), (None, None));
        assert!(half_of_free() > 0);
        #[cfg(target_os = "linux")]
        assert!(most_held().unwrap() > 1 << 20);
    }
}

//! How much of this computer's memory a search may take, and how much it took, as Linux tells it.

use std::fs::read_to_string;

/// What a search may take where nobody can tell how much is free.
const UNKNOWN: u64 = 2 << 30;

/// Half of the memory that is free: of the computer, or of the group of processes that this one is limited with.
pub fn half_of_free() -> u64 {
    let computer = read_to_string("/proc/meminfo").ok().and_then(|text| kilobytes(&text, "MemAvailable:"));
    let number = |name: &str| read_to_string(name).ok()?.trim().parse::<u64>().ok();
    let group = number("/sys/fs/cgroup/memory.max")
        .zip(number("/sys/fs/cgroup/memory.current"))
        .map(|(most, used)| most.saturating_sub(used));
    computer.into_iter().chain(group).min().map_or(UNKNOWN, |free| free / 2)
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

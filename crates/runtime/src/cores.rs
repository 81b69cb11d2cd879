//! Threads on cores of their own: a device of this computer is a core, so nobody may share one while there are enough.

/// Gives the calling thread, one of so many that work at once, a core of its own, where there are enough for all.
pub fn pin(thread: usize, threads: usize) {
    let cores = core_affinity::get_core_ids().filter(|cores| cores.len() >= threads);
    if let Some(core) = cores.and_then(|cores| cores.get(thread).copied()) {
        core_affinity::set_for_current(core);
    }
}

//! Threads on cores of their own: a device of this computer is a core, so nobody may share one while there are enough.

/// Gives the calling thread, one of so many that work at once, a core of its own, where there are enough for all.
pub fn pin(thread: usize, threads: usize) {
    let cores = core_affinity::get_core_ids().filter(|cores| cores.len() >= threads);
    if let Some(core) = cores.and_then(|cores| cores.get(thread).copied()) {
        core_affinity::set_for_current(core);
    }
}

/// Runs work on a thread for each of some things, all at once and each on a core of its own where there are enough; what became of each, in order.
/// Work that panics leaves no result.
pub fn on_each<I: Send, T: Send>(
    things: impl ExactSizeIterator<Item = I>,
    work: impl Fn(usize, I) -> T + Sync,
) -> Vec<T> {
    let (count, work) = (things.len(), &work);
    std::thread::scope(|scope| {
        let start = |(at, thing)| {
            scope.spawn(move || {
                pin(at, count);
                work(at, thing)
            })
        };
        let threads: Vec<_> = things.enumerate().map(start).collect();
        threads.into_iter().filter_map(|thread| thread.join().ok()).collect()
    })
}

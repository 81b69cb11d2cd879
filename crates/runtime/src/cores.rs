//! Pins threads to cores. A device of this computer is one core, so no two threads share a core while there are enough.

/// Pins the calling thread, number `thread` of `threads`, to its own core, if there are enough cores for all.
pub fn pin(thread: usize, threads: usize) {
    let cores = core_affinity::get_core_ids().filter(|cores| cores.len() >= threads);
    if let Some(core) = cores.and_then(|cores| cores.get(thread).copied()) {
        core_affinity::set_for_current(core);
    }
}

/// Runs `work` for each item on its own thread, all at once and pinned like [`pin`]. Returns the results in order.
/// A thread that panics leaves no result.
pub fn on_each<I: Send, T: Send>(
    items: impl ExactSizeIterator<Item = I>,
    work: impl Fn(usize, I) -> T + Sync,
) -> Vec<T> {
    let (count, work) = (items.len(), &work);
    std::thread::scope(|scope| {
        let start = |(at, item)| {
            scope.spawn(move || {
                pin(at, count);
                work(at, item)
            })
        };
        let threads: Vec<_> = items.enumerate().map(start).collect();
        threads.into_iter().filter_map(|thread| thread.join().ok()).collect()
    })
}

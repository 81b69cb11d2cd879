use shardwright_stages::*;
fn main() {
    let a: Vec<String> = std::env::args().collect();
    let bytes = std::fs::read(&a[1]).unwrap();
    let o = format::Overrides { devices: Some(a[2].parse().unwrap()), memory_bytes: Some(a[3].parse::<f64>().unwrap() * (1u64 << 30) as f64), micro_batches: Some(a[4].parse().unwrap()), bandwidth: None };
    let t = std::time::Instant::now();
    let p = format::read(&bytes, &o).unwrap(); let format::Problem::Layers(p) = p else { panic!() };
    let (g, ord) = reduce(&p);
    let lat = Lattice::all(&ord, 1 << 20, &|| false).map(|l| l.len());
    eprintln!("groups {} suffixes {:?} {:?}", g.len(), lat, t.elapsed());
    let progress = |p: &Progress<'_>| eprintln!("{:?} {:?}", t.elapsed(), p);
    let stop = || t.elapsed().as_secs() > 60;
    let out = solve_layers(&p, &Control { progress: &progress, stop: &stop, ..Control::default() });
    println!("{:.10} {:.10} {:?} {:?}", out.objective_seconds, out.lower_bound_seconds, out.stop_reason, t.elapsed());
    for s in out.stages.iter().flatten() { println!("{:?} y{} {} {:.4} {} {}", s.shape, s.in_flight, s.option.seconds, s.option.memory_bytes/(1u64<<30) as f64, s.option.layers.len(), s.option.options.iter().sum::<u32>()); }
}

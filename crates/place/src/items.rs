//! Items with their work, memory and data flows, and the devices and links that they are placed on.

/// Bytes that one item produces and another reads. Items are in topological order, so `from < to`. Bytes in the other direction (gradients)
/// are included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flow {
    /// The earlier item.
    pub from: u32,
    /// The later one.
    pub to: u32,
    /// Bytes, both directions.
    pub bytes: u64,
}

/// The items to be placed, each on one device.
#[derive(Clone, Debug)]
pub struct Items {
    /// Per item and kind of device: picoseconds.
    times: Vec<u64>,
    kinds: usize,
    memory: Vec<u64>,
    flows: Vec<Flow>,
    /// Per item: offset of its first neighbour.
    starts: Vec<u32>,
    /// Neighbours of all items with the bytes exchanged.
    neighbours: Vec<(u32, u64)>,
}

impl Items {
    /// Items by their picoseconds on each kind of device and the bytes that they hold. An item with fewer times than others takes its last
    /// time on all further kinds. Flows between the same two items are added up; flows from an item to itself, or to items that do not exist, are left out.
    pub fn new(items: &[(Vec<u64>, u64)], flows: impl IntoIterator<Item = Flow>) -> Self {
        let kinds = items.iter().map(|(times, _)| times.len()).max().unwrap_or(1).max(1);
        let times = items.iter().flat_map(|(times, _)| {
            let last = times.last().copied().unwrap_or(0);
            (0..kinds).map(move |kind| times.get(kind).copied().unwrap_or(last))
        });
        let count = items.len() as u32;
        let ordered = flows.into_iter().filter(|f| f.from != f.to && f.from.max(f.to) < count);
        let mut flows: Vec<Flow> =
            ordered.map(|f| Flow { from: f.from.min(f.to), to: f.from.max(f.to), ..f }).collect();
        flows.sort_unstable_by_key(|f| (f.from, f.to));
        flows.dedup_by(|next, kept| {
            let same = (next.from, next.to) == (kept.from, kept.to);
            if same {
                kept.bytes = kept.bytes.saturating_add(next.bytes);
            }
            same
        });
        let mut all = Self {
            times: times.collect(),
            kinds,
            memory: items.iter().map(|&(_, memory)| memory).collect(),
            flows,
            starts: Vec::new(),
            neighbours: Vec::new(),
        };
        all.link_up();
        all
    }

    fn link_up(&mut self) {
        let mut counts = vec![0u32; self.len() + 1];
        for flow in &self.flows {
            counts[flow.from as usize + 1] += 1;
            counts[flow.to as usize + 1] += 1;
        }
        for at in 1..counts.len() {
            counts[at] += counts[at - 1];
        }
        let mut next = counts.clone();
        self.neighbours = vec![(0, 0); 2 * self.flows.len()];
        for flow in &self.flows {
            for (own, other) in [(flow.from, flow.to), (flow.to, flow.from)] {
                self.neighbours[next[own as usize] as usize] = (other, flow.bytes);
                next[own as usize] += 1;
            }
        }
        self.starts = counts;
    }

    /// Number of items.
    pub fn len(&self) -> usize {
        self.memory.len()
    }

    /// Whether there are no items.
    pub fn is_empty(&self) -> bool {
        self.memory.is_empty()
    }

    /// Number of kinds of devices with known times.
    pub fn kinds(&self) -> usize {
        self.kinds
    }

    /// Picoseconds of an item on a kind of device; kinds without known times take those of the last kind.
    pub fn time(&self, item: usize, kind: usize) -> u64 {
        self.times[item * self.kinds + kind.min(self.kinds - 1)]
    }

    /// Bytes that an item holds.
    pub fn memory(&self, item: usize) -> u64 {
        self.memory[item]
    }

    /// All flows, sorted by their ends.
    pub fn flows(&self) -> &[Flow] {
        &self.flows
    }

    /// The items that an item exchanges bytes with, and how many.
    pub fn neighbours(&self, item: usize) -> &[(u32, u64)] {
        &self.neighbours[self.starts[item] as usize..self.starts[item + 1] as usize]
    }

    /// Clusters of connected items: for every threshold of bytes, the components that flows of at least that many bytes
    /// connect. A cluster has at least two items and at most half of all. Two clusters are disjoint, or one contains the other.
    pub fn clusters(&self) -> Vec<Vec<u32>> {
        let mut heaviest: Vec<&Flow> = self.flows.iter().collect();
        heaviest.sort_by_key(|flow| (std::cmp::Reverse(flow.bytes), flow.from, flow.to));
        let mut group: Vec<u32> = (0..self.len() as u32).collect();
        let mut members: Vec<Vec<u32>> = group.iter().map(|&item| vec![item]).collect();
        let mut clusters = Vec::new();
        for equal in heaviest.chunk_by(|a, b| a.bytes == b.bytes) {
            let mut grown = Vec::new();
            for flow in equal {
                let (a, b) = (group[flow.from as usize], group[flow.to as usize]);
                if a != b {
                    let few = members[a as usize].len() < members[b as usize].len();
                    let (into, from) = if few { (b, a) } else { (a, b) };
                    let joining = std::mem::take(&mut members[from as usize]);
                    joining.iter().for_each(|&item| group[item as usize] = into);
                    members[into as usize].extend(joining);
                    grown.push(into);
                }
            }
            grown.sort_unstable();
            grown.dedup();
            let grown = grown.iter().map(|&into| &members[into as usize]);
            clusters.extend(grown.filter(|own| (2..=self.len() / 2).contains(&own.len())).cloned());
        }
        clusters
    }

    /// Merges each group into one item. `group` has the group of every item; groups are numbered in the order of their first items.
    #[must_use]
    pub fn grouped(&self, group: &[u32], groups: usize) -> Self {
        let mut items = vec![(vec![0u64; self.kinds], 0u64); groups];
        for (item, &group) in group.iter().enumerate() {
            let (times, memory) = &mut items[group as usize];
            for (kind, time) in times.iter_mut().enumerate() {
                *time = time.saturating_add(self.time(item, kind));
            }
            *memory = memory.saturating_add(self.memory[item]);
        }
        let flow = |f: &Flow| Flow { from: group[f.from as usize], to: group[f.to as usize], ..*f };
        Self::new(&items, self.flows.iter().map(flow))
    }
}

/// The transfer time of a link.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// Picoseconds per transfer.
    pub latency: u64,
    /// Picoseconds per byte.
    pub per_byte: f64,
}

/// One digit of a device's number: its unit of a machine level.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Axis {
    /// Number of units.
    pub size: u32,
    /// The link of transfers between devices that differ on this axis and on no axis before it.
    pub link: Link,
}

/// The devices, in a hierarchy of links with the slowest first.
#[derive(Clone, Debug)]
pub struct Devices {
    axes: Vec<Axis>,
    /// Per device: its kind.
    kinds: Vec<u32>,
    /// Per device: the most bytes that it may hold.
    memory: Vec<u64>,
    /// Per pair of devices: the link between them.
    between: Vec<Link>,
}

impl Devices {
    /// Devices by the axes of their numbers, the most significant first. `device` gives each device's kind and its memory in bytes.
    pub fn new(axes: &[Axis], device: impl Fn(u32) -> (u32, u64)) -> Self {
        let count: u32 = axes.iter().map(|axis| axis.size).product();
        let free = Link { latency: 0, per_byte: 0.0 };
        let mut between = vec![free; (count * count) as usize];
        for a in 0..count {
            for b in 0..count {
                let mut stride = count;
                let differs = |axis: &&Axis| {
                    stride /= axis.size;
                    a / stride % axis.size != b / stride % axis.size
                };
                let link = axes.iter().find(differs).map_or(free, |axis| axis.link);
                between[(a * count + b) as usize] = link;
            }
        }
        let (kinds, memory) = (0..count).map(device).unzip();
        Self { axes: axes.to_vec(), kinds, memory, between }
    }

    /// Number of devices.
    pub fn len(&self) -> usize {
        self.kinds.len()
    }

    /// Whether there are no devices; never true.
    pub fn is_empty(&self) -> bool {
        self.kinds.is_empty()
    }

    /// The axes, outermost first.
    pub fn axes(&self) -> &[Axis] {
        &self.axes
    }

    /// A device's kind.
    pub fn kind(&self, device: usize) -> usize {
        self.kinds[device] as usize
    }

    /// Most bytes that a device may hold.
    pub fn memory(&self, device: usize) -> u64 {
        self.memory[device]
    }

    /// Picoseconds of a transfer between two devices.
    pub fn transfer(&self, bytes: u64, a: usize, b: usize) -> u64 {
        if a == b {
            return 0;
        }
        let link = self.between[a * self.len() + b];
        link.latency + (bytes as f64 * link.per_byte) as u64
    }

    /// Picoseconds of all work if it were divided perfectly: each device's share of the work.
    pub fn balanced(&self, items: &Items) -> u64 {
        let total = |kind: usize| (0..items.len()).map(|item| items.time(item, kind) as f64).sum::<f64>();
        let totals: Vec<f64> = (0..items.kinds()).map(total).collect();
        let of_kind = |&kind: &u32| totals[(kind as usize).min(totals.len() - 1)];
        let speed: f64 = self.kinds.iter().map(|kind| 1.0 / of_kind(kind).max(1.0)).sum();
        (1.0 / speed.max(f64::MIN_POSITIVE)) as u64
    }
}

//! How fast one group of devices can push bytes through each level while all other groups do the same.
//!
//! This is where sharing is decided. In a parallel program every group along a set of axes runs its collective at
//! the same time, so a link that several groups cross is divided among them: four GPUs of a node that each talk to
//! their counterpart in the next node get a quarter of the node's one network card; with a card per GPU they get
//! one each; below a PCIe switch they share its uplink. The result is a [`Crossing`] per level: seconds per byte for
//! the three traffic patterns that collectives are made of. Algorithms are put together from them in
//! [`crate::collective`]; nothing here knows what a collective is.
//!
//! What is not modelled: traffic of *other* operations at the same time (the simulator's business), and inner links
//! crossed on the way to an outer port (a GPU's PCIe lane towards the network card), which are faster than the port
//! on every machine described so far.

use shardwright_machine::{AxisSet, MAX_LEVELS, Machine, Topology};

/// A level that a set of axes crosses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Crossing {
    /// Units of this level in one group.
    pub units: u32,
    /// Members of one group inside one unit.
    pub inside: u32,
    /// Seconds from unit to unit for a message of no size.
    pub latency: f64,
    /// Steps of a ring through the units; on a torus, of one ring per dimension after the other.
    pub hops: f64,
    /// Steps from one unit to all, doubling at each; on a torus, wires to the farthest.
    pub depth: f64,
    /// Seconds per byte that every group passes from unit to neighbouring unit around a ring of its units.
    pub ring: f64,
    /// Seconds per byte that every device exchanges evenly with the counterparts of its unit in the others,
    /// counting the byte whether or not it stays at home.
    pub exchange: f64,
    /// Seconds per byte that every active device sends to one other unit.
    pub shift: f64,
    /// Seconds per byte that one device of each group sends to one other unit.
    pub single: f64,
}

/// The crossings of one set of axes, outermost level first.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Crossings {
    list: [Option<Crossing>; MAX_LEVELS],
    /// Devices in one group.
    pub members: u32,
}

impl Crossings {
    pub(crate) fn iter(&self) -> impl DoubleEndedIterator<Item = &Crossing> + Clone {
        self.list.iter().flatten()
    }

    /// Works out the crossings of a set of prime axes, when the tensor is absent from all but one digit of some
    /// others (whose remaining devices are idle and leave the links alone).
    pub(crate) fn new(machine: &Machine, axes: AxisSet, absent: AxisSet) -> Crossings {
        let mesh = machine.mesh();
        let size = |of: &dyn Fn(usize) -> bool, within: AxisSet| -> u32 {
            let sizes = mesh.axes().iter().enumerate().filter(|&(at, _)| within.0 >> at & 1 == 1 && of(at));
            sizes.map(|(_, axis)| axis.size).product()
        };
        let active = mesh.all().minus(absent.minus(axes));
        let level_of = |at: usize| mesh.axes()[at].level.index();
        let mut list = [None; MAX_LEVELS];
        for (l, level) in machine.levels().iter().enumerate() {
            let units = size(&|at| level_of(at) == l, axes);
            if units == 1 {
                continue;
            }
            let inside = size(&|at| level_of(at) > l, axes);
            let per_unit = size(&|at| level_of(at) > l, active);
            let geometry = Geometry {
                count: f64::from(level.count),
                units: f64::from(units),
                groups: f64::from(per_unit / inside),
                per_unit: f64::from(per_unit),
                // Ports without an active device stay dark.
                port_rate: level.link.effective_bandwidth().0 * f64::from(level.link.ports.min(per_unit)),
            };
            let mut rates = match &level.link.topology {
                Topology::Switch => geometry.switch(),
                Topology::Memory => geometry.memory(),
                Topology::FullyConnected => geometry.fully_connected(),
                Topology::Torus { dims, wrap } => {
                    let lines: Vec<Line> = (0..dims.len())
                        .map(|dim| Line::new(machine, l, dim, axes, dims[dim], wrap[dim]))
                        .collect();
                    geometry.torus(&lines)
                }
                Topology::PcieTree { uplinks, peer_to_peer, .. } => {
                    let mut rates = geometry.switch();
                    // Depth t joins dimensions t.. of the grid; its uplink is crossed by groups that reach outside.
                    for (t, uplink) in uplinks.iter().enumerate().map(|(at, rate)| (at + 1, rate)) {
                        let dim_of = |at: usize| mesh.axes()[at].dim as usize;
                        let below = |at: usize| level_of(at) > l || (level_of(at) == l && dim_of(at) >= t);
                        let here = |at: usize| level_of(at) == l && dim_of(at) >= t;
                        let units_below = size(&here, axes);
                        // Above the socket only what crosses sockets; below it, without peer-to-peer, everything.
                        let staged = !peer_to_peer && t > 1;
                        if units_below == units && !staged {
                            continue;
                        }
                        let rate = uplink.0 * level.link.efficiency;
                        let devices = f64::from(size(&below, active));
                        let members = f64::from(size(&below, axes));
                        let groups = devices / members;
                        // Staged, every unit below sends its own stream up; direct, a group crosses once.
                        let streams =
                            if staged { f64::from(size(&here, active)) * geometry.groups } else { groups };
                        let leaving =
                            if staged { f64::from(units - 1) } else { f64::from(units - units_below) };
                        rates.ring = rates.ring.max(streams / rate);
                        rates.exchange = rates.exchange.max(devices * leaving / f64::from(units) / rate);
                        rates.shift = rates.shift.max(devices / rate);
                        rates.single = rates.single.max(groups / rate);
                    }
                    rates
                }
            };
            rates.units = units;
            rates.inside = inside;
            rates.latency = level.link.latency.0;
            list[l] = Some(rates);
        }
        Crossings { list, members: size(&|_| true, axes) }
    }
}

/// The numbers of one level that every topology needs.
struct Geometry {
    /// Units of the level.
    count: f64,
    /// Units in one group.
    units: f64,
    /// Groups that share a unit.
    groups: f64,
    /// Active devices in a unit.
    per_unit: f64,
    /// Bytes per second out of, and into, a unit.
    port_rate: f64,
}

impl Geometry {
    fn rates(&self, ring: f64, exchange: f64, shift: f64, single: f64) -> Crossing {
        // Where every unit is one step from every other.
        let (hops, depth) = (self.units - 1.0, self.units.log2().ceil());
        Crossing { units: 0, inside: 0, latency: 0.0, hops, depth, ring, exchange, shift, single }
    }

    fn switch(&self) -> Crossing {
        let per_byte = 1.0 / self.port_rate;
        let leaving = (self.units - 1.0) / self.units;
        self.rates(
            self.groups * per_byte,
            self.per_unit * leaving * per_byte,
            self.per_unit * per_byte,
            self.groups * per_byte,
        )
    }

    /// Every byte of a result is written, from whomever it comes: there is no share that stays where it is.
    fn memory(&self) -> Crossing {
        let switch = self.switch();
        let whole = self.units / (self.units - 1.0);
        self.rates(switch.ring * whole, switch.exchange * whole, switch.shift, switch.single)
    }

    /// Of a unit's wires only those to units of its own group are of use; one peer means one wire.
    fn fully_connected(&self) -> Crossing {
        let switch = self.switch();
        let wires = self.count - 1.0;
        let unused = wires / (self.units - 1.0);
        self.rates(
            switch.ring * unused,
            switch.exchange * unused,
            switch.shift * wires,
            switch.single * wires,
        )
    }

    /// Rings run along every dimension at once, so their rates add up; an exchange goes dimension by dimension and
    /// waits for the fullest wire.
    fn torus(&self, lines: &[Line]) -> Crossing {
        // One way along one dimension.
        let wire = self.port_rate / lines.len() as f64 / 2.0;
        let used = || lines.iter().filter(|line| line.units > 1.0);
        let ring_rate: f64 = used().map(|line| line.ring_share() * wire).sum();
        let exchange = used().map(|line| line.exchange_load() / wire).fold(0.0, f64::max);
        let shift: f64 = used().map(|line| line.stride / wire).fold(0.0, f64::max);
        let rates = self.rates(
            self.groups / ring_rate,
            self.per_unit * exchange,
            self.per_unit * shift,
            self.groups * shift,
        );
        let far = |line: &Line| if line.closed { (line.extent / 2.0).floor() } else { line.extent - 1.0 };
        Crossing { hops: used().map(|line| line.units - 1.0).sum(), depth: used().map(far).sum(), ..rates }
    }
}

/// The part of a group that lies along one dimension of a torus.
struct Line {
    /// Members along the dimension.
    units: f64,
    /// Positions from the first member to the end of the stretch that its groups interleave in.
    extent: f64,
    /// Largest step between members, in positions.
    stride: f64,
    /// The group goes all the way round a closed ring.
    closed: bool,
}

impl Line {
    fn new(machine: &Machine, level: usize, dim: usize, axes: AxisSet, size: u32, wrap: bool) -> Line {
        let mut line = Line { units: 1.0, extent: 1.0, stride: 1.0, closed: false };
        let mut position = 1.0;
        for (at, axis) in machine.mesh().axes().iter().enumerate().rev() {
            if axis.level.index() != level || axis.dim as usize != dim {
                continue;
            }
            let before = position;
            position *= f64::from(axis.size);
            if axes.0 >> at & 1 == 1 {
                line.units *= f64::from(axis.size);
                line.extent = position;
                line.stride = before;
            }
        }
        line.closed = wrap && line.extent == f64::from(size);
        line
    }

    /// How many one-way wires' worth of bandwidth a ring along this line has. Closed: both ways round, shared by
    /// the groups that interleave. Open: out one way and back the other, so one.
    fn ring_share(&self) -> f64 {
        let share = self.units / self.extent;
        if self.closed { 2.0 * share } else { share }
    }

    /// Bytes over the fullest one-way wire when every device exchanges one byte evenly with its group: in the
    /// middle of a line half the members talk to the other half; a closed ring halves that.
    fn exchange_load(&self) -> f64 {
        let halves = (self.units / 2.0).floor() * (self.units / 2.0).ceil();
        let open = halves / self.units * (self.extent / self.units);
        if self.closed { open / 2.0 } else { open }
    }
}

//! Bandwidth of one group of devices at each level while all other groups communicate too.
//!
//! This module decides how links are shared. In a parallel program every group along a set of axes runs its collective
//! at the same time, so the groups that cross a link divide its bandwidth. Four GPUs of a node that each talk to their
//! counterpart in the next node get a quarter of the node's one network card. With a card per GPU they get one each.
//! Below a PCIe switch they share its uplink. The result is a [`LevelCrossing`] per level: seconds per byte for the
//! traffic patterns of collectives. [`crate::collective`] combines them into algorithms.
//!
//! Two effects are not modelled. Traffic of *other* operations at the same time is left to the simulator. Inner links
//! towards an outer port (a GPU's PCIe lanes towards the network card) are faster than the port on every machine
//! described so far.

use shardwright_machine::{AxisSet, MAX_LEVELS, Machine, Topology};

/// The rates of one level that a set of axes crosses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LevelCrossing {
    /// Units of this level in one group.
    pub units: u32,
    /// Members of one group inside one unit.
    pub inside: u32,
    /// Seconds from unit to unit for an empty message.
    pub latency: f64,
    /// Steps of a ring through the units; on a torus, the sum over one ring per dimension.
    pub ring_steps: f64,
    /// Depth of a binary tree over the units; on a torus, wires to the farthest unit.
    pub tree_depth: f64,
    /// Seconds per byte that every group passes around a ring of its units.
    pub ring: f64,
    /// Seconds per byte that every device exchanges evenly with its counterparts in all units, its own share included.
    pub exchange: f64,
    /// Seconds per byte that every active device sends to one other unit.
    pub shift: f64,
    /// Seconds per byte that one device of each group sends to one other unit.
    pub single: f64,
}

/// The crossings of one set of axes, outermost level first.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Crossings {
    list: [Option<LevelCrossing>; MAX_LEVELS],
    /// Devices in one group.
    pub members: u32,
    /// Whether collectives may run a ring per level. NCCL's run one ring through all members. Rings along the
    /// dimensions of a torus nest, and so do those within one level.
    pub nest_rings: bool,
}

impl Crossings {
    pub(crate) fn iter(&self) -> impl DoubleEndedIterator<Item = &LevelCrossing> + Clone {
        self.list.iter().flatten()
    }

    /// The same with the numbers of their levels.
    pub(crate) fn levels(&self) -> impl Iterator<Item = (usize, &LevelCrossing)> {
        self.list.iter().enumerate().filter_map(|(level, crossing)| Some((level, crossing.as_ref()?)))
    }

    /// The crossings of a set of prime axes. The tensor lives on one digit of the `absent` axes only; the devices of their
    /// other digits are idle and use no bandwidth.
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
            let geometry = LevelGeometry {
                count: f64::from(level.count),
                units: f64::from(units),
                groups: f64::from(per_unit / inside),
                per_unit: f64::from(per_unit),
                // Ports without an active device carry nothing.
                port_rate: level.link.effective_bandwidth().0 * f64::from(level.link.ports.min(per_unit)),
            };
            let mut rates = match &level.link.topology {
                Topology::Switch => geometry.switch(),
                Topology::Memory => geometry.memory(),
                Topology::FullyConnected => geometry.fully_connected(),
                Topology::Torus { dims, wrap } => {
                    let lines: Vec<TorusLine> = (0..dims.len())
                        .map(|dim| TorusLine::new(machine, l, dim, axes, dims[dim], wrap[dim]))
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
                        // Uplinks above the socket carry only traffic between sockets. Below it, without
                        // peer-to-peer, they carry all traffic.
                        let staged = !peer_to_peer && t > 1;
                        if units_below == units && !staged {
                            continue;
                        }
                        let rate = uplink.0 * level.link.efficiency;
                        let devices = f64::from(size(&below, active));
                        let members = f64::from(size(&below, axes));
                        let groups = devices / members;
                        // Staged, every unit below sends its own stream up. Direct, a group crosses once.
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
        let crossed = || machine.levels().iter().zip(&list).filter(|(_, crossing)| crossing.is_some());
        let is_torus = crossed().any(|(level, _)| matches!(level.link.topology, Topology::Torus { .. }));
        let nest_rings = is_torus || crossed().count() == 1;
        Crossings { list, members: size(&|_| true, axes), nest_rings }
    }
}

/// The numbers of one level that every topology needs.
struct LevelGeometry {
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

impl LevelGeometry {
    fn rates(&self, ring: f64, exchange: f64, shift: f64, single: f64) -> LevelCrossing {
        // For levels where every unit is one step from every other.
        let (ring_steps, tree_depth) = (self.units - 1.0, self.units.log2().ceil());
        LevelCrossing {
            units: 0,
            inside: 0,
            latency: 0.0,
            ring_steps,
            tree_depth,
            ring,
            exchange,
            shift,
            single,
        }
    }

    fn switch(&self) -> LevelCrossing {
        let per_byte = 1.0 / self.port_rate;
        let leaving = (self.units - 1.0) / self.units;
        self.rates(
            self.groups * per_byte,
            self.per_unit * leaving * per_byte,
            self.per_unit * per_byte,
            self.groups * per_byte,
        )
    }

    /// In shared memory every byte of a result is written, also the device's own share.
    fn memory(&self) -> LevelCrossing {
        let switch = self.switch();
        let whole = self.units / (self.units - 1.0);
        self.rates(switch.ring * whole, switch.exchange * whole, switch.shift, switch.single)
    }

    /// A unit uses only its wires to units of its own group; one peer means one wire.
    fn fully_connected(&self) -> LevelCrossing {
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

    /// Rings run along all dimensions at once, so their rates add up. An exchange goes dimension by dimension, and its
    /// busiest wire determines the time.
    fn torus(&self, lines: &[TorusLine]) -> LevelCrossing {
        // Bandwidth in one direction of one dimension.
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
        let far =
            |line: &TorusLine| if line.closed { (line.extent / 2.0).floor() } else { line.extent - 1.0 };
        LevelCrossing {
            ring_steps: used().map(|line| line.units - 1.0).sum(),
            tree_depth: used().map(far).sum(),
            ..rates
        }
    }
}

/// The members of a group along one dimension of a torus.
struct TorusLine {
    /// Members along the dimension.
    units: f64,
    /// Length of the segment in which the group interleaves with others, in positions.
    extent: f64,
    /// Largest distance between neighbouring members, in positions.
    stride: f64,
    /// Whether the group spans a closed ring.
    closed: bool,
}

impl TorusLine {
    fn new(machine: &Machine, level: usize, dim: usize, axes: AxisSet, size: u32, wrap: bool) -> TorusLine {
        let mut line = TorusLine { units: 1.0, extent: 1.0, stride: 1.0, closed: false };
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

    /// Bandwidth of a ring along this line, in one-way wires. A closed ring uses both directions, shared by the groups
    /// that interleave. An open line goes out in one direction and back in the other, so it counts once.
    fn ring_share(&self) -> f64 {
        let share = self.units / self.extent;
        if self.closed { 2.0 * share } else { share }
    }

    /// Bytes over the busiest one-way wire when every device exchanges one byte evenly with its group. In the middle of a
    /// line, half of the members send to the other half; a closed ring halves the load.
    fn exchange_load(&self) -> f64 {
        let halves = (self.units / 2.0).floor() * (self.units / 2.0).ceil();
        let open = halves / self.units * (self.extent / self.units);
        if self.closed { open / 2.0 } else { open }
    }
}

//! Machines: levels of devices joined by links, and the mesh axes along which work is split.
//!
//! A [`Machine`] comes from a built-in name or a TOML file and is checked once. It describes its mesh axes, the groups
//! of devices along them, its devices and the links of its levels. The `cost` crate computes costs from it. This crate
//! does no I/O: callers provide a reader for files.
//!
//! ```
//! use shardwright_machine::{AxisSet, builtin};
//!
//! // Four nodes of four GPUs: the axes are the prime factors of the counts.
//! let machine = builtin("p100x16")?;
//! let mesh = machine.mesh();
//! let names: Vec<&str> = mesh.axes().iter().map(|axis| axis.name.as_str()).collect();
//! assert_eq!(names, ["node.0", "node.1", "gpu.0", "gpu.1"]);
//!
//! // Device 6 is GPU 2 of node 1; along the two inner axes it belongs to the group of its node.
//! let gpu: AxisSet = ["gpu.0", "gpu.1"].iter().filter_map(|name| mesh.axis_named(name)).collect();
//! let group: Vec<u32> = mesh.groups(gpu)[1].iter().map(|device| device.0).collect();
//! assert_eq!(group, [4, 5, 6, 7]);
//!
//! // The first four devices are one node, without a network level.
//! assert_eq!(builtin("p100x16:4")?.levels().len(), 1);
//! # Ok::<(), shardwright_machine::MachineError>(())
//! ```

mod builtin;
mod error;
mod file;
mod machine;
mod measurement;
mod mesh;
mod sized;
mod spec;
mod text;
mod toml_table;
mod units;

pub use builtin::{builtin, builtin_file, builtin_names, is_file, open};
pub use error::{FileLocation, MachineError};
pub use file::{MAX_FILE_BYTES, ReadFile, parse};
pub use machine::{Fingerprint, Machine};
pub use measurement::{CollectiveKind, CollectiveMeasurement, MeasuredTime};
pub use mesh::{Axis, AxisId, AxisIter, AxisSet, DeviceId, LevelId, Mesh, MeshError, prime_factors};
pub use spec::{
    Device, DeviceOverride, EngineName, Level, Link, MAX_AXES, MAX_DEVICES, MAX_LEVELS, MachineSpec, Peaks,
    Precision, SpecError, Tf32Use, Topology,
};
pub use units::{Bytes, BytesPerSecond, FlopsPerSecond, Seconds, show_bytes};

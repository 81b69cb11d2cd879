//! The outcomes of a process's devices as bytes, for the process that started it.
//!
//! Both sides are the same program, so the format has one version. The reader still checks everything, since a process that
//! dies leaves an incomplete stream.

use crate::buffer::Buffer;
use crate::run::DeviceOutcome;
use crate::worker::{DeviceTimes, TraceEvent};
use shardwright_graph::{DType, Shape, TensorType};
use shardwright_lower::InstructionId;
use shardwright_runtime::HostTensor;
use std::io::{self, Read, Write};
use std::time::Duration;

fn number(out: &mut impl Write, n: u64) -> io::Result<()> {
    out.write_all(&n.to_ne_bytes())
}

fn value(out: &mut impl Write, value: Option<&HostTensor>) -> io::Result<()> {
    let Some(value) = value else { return number(out, 0) };
    let ty = value.ty();
    let kind = DType::ALL.iter().position(|&d| d == ty.dtype);
    let kind = kind.ok_or_else(|| io::Error::other(format!("{} has no number: this is a bug", ty.dtype)))?;
    number(out, 1 + kind as u64)?;
    number(out, ty.rank() as u64)?;
    ty.shape.iter().try_for_each(|&n| number(out, n))?;
    let mut buffer = Buffer::zeroed(ty.bytes() as usize);
    buffer.write(value);
    out.write_all(&buffer.bytes()[..ty.bytes() as usize])
}

/// Writes the outcomes of devices.
pub fn write_outcomes(out: &mut impl Write, outcomes: &[DeviceOutcome]) -> io::Result<()> {
    number(out, outcomes.len() as u64)?;
    for outcome in outcomes {
        number(out, u64::from(outcome.device))?;
        number(out, outcome.losses.len() as u64)?;
        outcome.losses.iter().try_for_each(|loss| value(out, Some(loss)))?;
        number(out, outcome.finals.len() as u64)?;
        outcome.finals.iter().try_for_each(|last| value(out, last.as_ref()))?;
        number(out, outcome.step_ends.len() as u64)?;
        outcome.step_ends.iter().try_for_each(|end| number(out, end.to_bits()))?;
        let times = &outcome.times;
        for time in [times.computing, times.communicating, times.waiting] {
            number(out, time.as_nanos() as u64)?;
        }
        number(out, outcome.memory)?;
        number(out, outcome.stolen)?;
        number(out, outcome.events.len() as u64)?;
        for event in &outcome.events {
            number(out, u64::from(event.instruction.0))?;
            number(out, event.start.to_bits())?;
            number(out, event.seconds.to_bits())?;
        }
    }
    out.flush()
}

struct Reader<R>(R);

impl<R: Read> Reader<R> {
    fn number(&mut self) -> io::Result<u64> {
        let mut bytes = [0; 8];
        self.0.read_exact(&mut bytes)?;
        Ok(u64::from_ne_bytes(bytes))
    }

    /// Reads a list. It grows as it is read: a declared length alone allocates nothing.
    fn list<T>(&mut self, mut item: impl FnMut(&mut Self) -> io::Result<T>) -> io::Result<Vec<T>> {
        let count = self.number()?;
        let mut list = Vec::new();
        for _ in 0..count {
            list.push(item(self)?);
        }
        Ok(list)
    }

    fn float(&mut self) -> io::Result<f64> {
        self.number().map(f64::from_bits)
    }

    fn value(&mut self) -> io::Result<Option<HostTensor>> {
        let bad = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
        let Some(kind) = self.number()?.checked_sub(1) else { return Ok(None) };
        let dtype = *DType::ALL.get(kind as usize).ok_or_else(|| bad("an unknown element type".into()))?;
        let shape: Shape = self.list(Self::number)?.into();
        shape.check().map_err(bad)?;
        let ty = TensorType { dtype, shape };
        let mut bytes = Vec::new();
        (&mut self.0).take(ty.bytes()).read_to_end(&mut bytes)?;
        if bytes.len() as u64 != ty.bytes() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let mut buffer = Buffer::zeroed(bytes.len());
        buffer.bytes_mut()[..bytes.len()].copy_from_slice(&bytes);
        Ok(Some(buffer.to_tensor(&ty)))
    }

    fn outcome(&mut self) -> io::Result<DeviceOutcome> {
        Ok(DeviceOutcome {
            device: self.number()? as u32,
            losses: self.list(Self::value)?.into_iter().flatten().collect(),
            finals: self.list(Self::value)?,
            step_ends: self.list(Self::float)?,
            times: DeviceTimes {
                computing: Duration::from_nanos(self.number()?),
                communicating: Duration::from_nanos(self.number()?),
                waiting: Duration::from_nanos(self.number()?),
            },
            memory: self.number()?,
            stolen: self.number()?,
            events: self.list(|reader| {
                Ok(TraceEvent {
                    instruction: InstructionId(reader.number()? as u32),
                    start: reader.float()?,
                    seconds: reader.float()?,
                })
            })?,
        })
    }
}

/// Reads outcomes that [`write_outcomes`] wrote.
pub fn read_outcomes(input: impl Read) -> io::Result<Vec<DeviceOutcome>> {
    Reader(input).list(Reader::outcome)
}

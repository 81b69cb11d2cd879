//! The other processes of a run: what leaves this one goes through Unix sockets, one per pair of processes.
//!
//! A thread per socket writes what devices hand it, another reads and puts messages into the receivers' slots. Every
//! message is acknowledged when its receiver takes it, so that a slot is always free for the next and readers never
//! wait. A socket that closes before its process has said goodbye means that the process died: everybody stops, with
//! an error that names it.
//!
//! Frames: a kind (one byte), a number (four bytes: the edge), a length (eight bytes) and that many bytes. Both sides are
//! the same program on the same machine, so numbers are in its own byte order; lengths are still checked.

use crate::bell::Alarm;
use crate::buffer::Buffer;
use crate::fabric::{Edge, Fabric, Packing, Placement};
use std::io::{self, BufWriter, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

const DATA: u8 = 1;
const TAKEN: u8 = 2;
const FAILED: u8 = 3;
const GOODBYE: u8 = 4;

/// How long processes wait for each other to start.
const START: Duration = Duration::from_secs(60);

/// How long goodbyes are waited for once something has failed.
const GRACE: Duration = Duration::from_secs(1);

/// The longest reason that is told.
const LONGEST_REASON: u64 = 1 << 16;

struct Frame {
    kind: u8,
    number: u32,
    bytes: Vec<u8>,
}

/// A socket to each other process, before anything runs.
pub struct Sockets {
    placement: Placement,
    me: u32,
    streams: Vec<Option<UnixStream>>,
}

/// The other processes, as devices see them.
pub struct Remote {
    placement: Placement,
    me: u32,
    writers: Vec<Option<Mutex<Sender<Frame>>>>,
    /// Per edge: whether a message is on its way and not taken.
    on_their_way: Vec<AtomicBool>,
    streams: Vec<Option<UnixStream>>,
    partings: Arc<Partings>,
}

/// Which processes have said goodbye.
struct Partings {
    parted: Mutex<Vec<bool>>,
    changed: Condvar,
}

/// Where a process listens.
fn address(folder: &Path, process: u32) -> PathBuf {
    folder.join(format!("{process}.socket"))
}

impl Sockets {
    /// Connects process `me` with all others; they meet in a folder that only they know.
    pub fn connect(folder: &Path, placement: Placement, me: u32) -> io::Result<Self> {
        let deadline = Instant::now() + START;
        let late = |process: u32| {
            let text = format!("process {process} did not start within {} s", START.as_secs());
            io::Error::new(io::ErrorKind::TimedOut, text)
        };
        let listener = UnixListener::bind(address(folder, me))?;
        listener.set_nonblocking(true)?;
        let mut streams: Vec<Option<UnixStream>> = (0..placement.processes).map(|_| None).collect();
        for process in 0..me {
            let mut stream = loop {
                match UnixStream::connect(address(folder, process)) {
                    Ok(stream) => break stream,
                    Err(_) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(5)),
                    Err(_) => return Err(late(process)),
                }
            };
            stream.write_all(&me.to_ne_bytes())?;
            streams[process as usize] = Some(stream);
        }
        while let Some(missing) = (me + 1..placement.processes).find(|&p| streams[p as usize].is_none()) {
            match listener.accept() {
                Ok((mut stream, _)) => {
                    stream.set_nonblocking(false)?;
                    let mut number = [0; 4];
                    stream.read_exact(&mut number)?;
                    match streams.get_mut(u32::from_ne_bytes(number) as usize) {
                        Some(place) if place.is_none() => *place = Some(stream),
                        _ => return Err(io::Error::other("an unknown process connected")),
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Err(late(missing)),
                Err(error) => return Err(error),
            }
        }
        Ok(Self { placement, me, streams })
    }

    /// Runs `work` on a fabric that leads to the other processes; returns once they have parted.
    pub fn with_fabric<T>(self, fabric: Fabric, work: impl FnOnce(&Fabric) -> T) -> io::Result<T> {
        let partings = Arc::new(Partings {
            parted: Mutex::new(self.streams.iter().map(Option::is_none).collect()),
            changed: Condvar::new(),
        });
        let mut writers = Vec::new();
        let mut outgoing = Vec::new();
        for stream in &self.streams {
            let pair = stream.as_ref().map(|_| channel());
            let (sender, receiver) = pair.unzip();
            writers.push(sender.map(Mutex::new));
            outgoing.push(receiver);
        }
        let remote = Remote {
            placement: self.placement,
            me: self.me,
            writers,
            on_their_way: fabric.edges().iter().map(|_| AtomicBool::new(false)).collect(),
            streams: self
                .streams
                .iter()
                .map(|s| s.as_ref().map(UnixStream::try_clone).transpose())
                .collect::<Result<_, _>>()?,
            partings: partings.clone(),
        };
        let fabric = fabric.with_remote(remote);
        Ok(std::thread::scope(|scope| {
            let (fabric, partings, at) = (&fabric, &partings, self.placement);
            for (process, (stream, frames)) in (0u32..).zip(self.streams.into_iter().zip(outgoing)) {
                let (Some(stream), Some(frames)) = (stream, frames) else { continue };
                let Ok(reading) = stream.try_clone() else {
                    fabric.fail(format!("process {process} cannot be read from"));
                    continue;
                };
                // A process that went away is noticed by the one who reads from it.
                scope.spawn(move || write_frames(&stream, &frames));
                scope.spawn(move || {
                    if let Err(error) = read_frames(reading, fabric, process, at) {
                        let devices = at.of(process);
                        let (first, last) = (devices.start, devices.end - 1);
                        fabric.fail(format!("process {process} (devices {first} to {last}) died: {error}"));
                    }
                    partings.part(process);
                });
            }
            let result = work(fabric);
            fabric.part();
            result
        }))
    }
}

fn write_frame(out: &mut impl Write, frame: &Frame) -> io::Result<()> {
    out.write_all(&[frame.kind])?;
    out.write_all(&frame.number.to_ne_bytes())?;
    out.write_all(&(frame.bytes.len() as u64).to_ne_bytes())?;
    out.write_all(&frame.bytes)
}

/// Writes what devices hand over, until goodbye is said or the other side is gone, which its reader notices.
fn write_frames(stream: &UnixStream, frames: &Receiver<Frame>) -> io::Result<()> {
    let mut out = BufWriter::with_capacity(1 << 16, stream);
    while let Ok(frame) = frames.recv() {
        let mut next = Some(frame);
        // Whatever is waiting goes out together.
        while let Some(frame) = next.take() {
            write_frame(&mut out, &frame)?;
            if frame.kind == GOODBYE {
                out.flush()?;
                return stream.shutdown(Shutdown::Write);
            }
            next = frames.try_recv().ok();
        }
        out.flush()?;
    }
    Ok(())
}

/// Reads what another process sends, until it says goodbye. An error is the end of that process.
fn read_frames(mut stream: UnixStream, fabric: &Fabric, from: u32, at: Placement) -> io::Result<()> {
    let bad = |what: &str| io::Error::new(io::ErrorKind::InvalidData, format!("it sent {what}"));
    loop {
        let mut head = [0; 13];
        stream.read_exact(&mut head)?;
        let number = u32::from_ne_bytes([head[1], head[2], head[3], head[4]]);
        let mut length = [0; 8];
        length.copy_from_slice(&head[5..]);
        let length = u64::from_ne_bytes(length);
        let edge = fabric.edges().get(number as usize);
        match head[0] {
            DATA => {
                let edge = edge.filter(|e| e.bytes == length && at.process(e.from) == from);
                let edge = edge.ok_or_else(|| bad("a message that was not expected"))?;
                let mut buffer = Buffer::zeroed(edge.bytes as usize);
                stream.read_exact(&mut buffer.bytes_mut()[..edge.bytes as usize])?;
                if !fabric.deliver(number, &Arc::new(buffer)) {
                    return Err(bad("a message before the last one was taken"));
                }
            }
            TAKEN if edge.is_some() => fabric.acknowledged(number),
            FAILED if length <= LONGEST_REASON => {
                let mut reason = vec![0; length as usize];
                stream.read_exact(&mut reason)?;
                fabric.fail(String::from_utf8_lossy(&reason));
            }
            GOODBYE => return Ok(()),
            _ => return Err(bad("what this program does not know")),
        }
    }
}

impl Remote {
    /// Whether a device is in this process.
    pub fn is_here(&self, device: u32) -> bool {
        self.placement.process(device) == self.me
    }

    fn hand(&self, process: u32, frame: Frame) {
        if let Some(Some(writer)) = self.writers.get(process as usize) {
            // Where the writer is gone, so is the process, which its reader tells.
            let _ = writer.lock().unwrap_or_else(PoisonError::into_inner).send(frame);
        }
    }

    /// Sends what the receiver needs of a buffer; false where the last message was not taken yet.
    pub fn send(&self, number: u32, edge: Edge, buffer: &Buffer, packing: &Packing) -> bool {
        if self.on_their_way[number as usize].swap(true, Ordering::AcqRel) {
            return false;
        }
        let mut bytes = vec![0; edge.bytes as usize];
        packing.walk.copy(&mut bytes, buffer.bytes(), packing.size);
        self.hand(self.placement.process(edge.to), Frame { kind: DATA, number, bytes });
        true
    }

    /// Tells the sender of a message that it was taken.
    pub fn acknowledge(&self, number: u32, from: u32) {
        self.hand(self.placement.process(from), Frame { kind: TAKEN, number, bytes: Vec::new() });
    }

    /// The last message along an edge was taken.
    pub fn acknowledged(&self, number: u32) {
        self.on_their_way[number as usize].store(false, Ordering::Release);
    }

    /// Tells all others why everybody has to stop.
    pub fn tell(&self, reason: &str) {
        let bytes = reason.as_bytes()[..reason.len().min(LONGEST_REASON as usize)].to_vec();
        for process in 0..self.placement.processes {
            self.hand(process, Frame { kind: FAILED, number: 0, bytes: bytes.clone() });
        }
    }

    /// Says goodbye and waits for the others to do so; not for long once something has failed.
    pub fn part(&self, alarm: &Alarm) {
        for process in 0..self.placement.processes {
            self.hand(process, Frame { kind: GOODBYE, number: 0, bytes: Vec::new() });
        }
        self.partings.wait(alarm);
        for stream in self.streams.iter().flatten() {
            // It may be closed already, which is what is wanted.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

impl Partings {
    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<bool>> {
        self.parted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn part(&self, process: u32) {
        self.lock()[process as usize] = true;
        self.changed.notify_all();
    }

    /// Waits until all have parted; after a failure, only as long as telling it may take.
    fn wait(&self, alarm: &Alarm) {
        let mut failed: Option<Instant> = None;
        let mut parted = self.lock();
        while parted.iter().any(|parted| !parted) {
            if alarm.is_raised() && failed.get_or_insert_with(Instant::now).elapsed() > GRACE {
                return;
            }
            let waited = self.changed.wait_timeout(parted, Duration::from_millis(50));
            parted = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

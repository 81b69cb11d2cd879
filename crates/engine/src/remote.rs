//! Messages to other processes of a run, through Unix sockets: one per pair of processes.
//!
//! Per socket, one thread writes the frames that devices queue, and another reads messages into the receivers' slots. A
//! message is acknowledged when its receiver takes it. So a slot is always free for the next message and reader threads never
//! wait. A socket that closes before its process has said goodbye means that the process died: all devices stop, with
//! an error that names it.
//!
//! Frames: a kind (one byte), a number (four bytes: the edge), a length (eight bytes) and that many bytes. Both sides are
//! the same program on the same machine, so numbers are in native byte order. Lengths are still checked.

use crate::buffer::Buffer;
use crate::fabric::{Edge, Fabric, Packing, ProcessMap};
use crate::notifier::StopSignal;
use std::io::{self, BufWriter, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::Builder;
use std::time::{Duration, Instant};

const DATA: u8 = 1;
const ACKNOWLEDGED: u8 = 2;
const FAILED: u8 = 3;
const GOODBYE: u8 = 4;

/// How long a process waits for the others to start.
const START: Duration = Duration::from_secs(60);

/// How long a process waits for goodbyes after a failure.
const GRACE: Duration = Duration::from_secs(1);

/// Most bytes of a failure's reason in a frame.
const LONGEST_REASON: u64 = 1 << 16;

struct Frame {
    kind: u8,
    number: u32,
    bytes: Vec<u8>,
}

/// Sockets to all other processes, before the run.
pub struct Sockets {
    process_map: ProcessMap,
    me: u32,
    streams: Vec<Option<UnixStream>>,
}

/// The other processes, as devices see them.
pub struct RemoteProcesses {
    process_map: ProcessMap,
    me: u32,
    writers: Vec<Option<Mutex<Sender<Frame>>>>,
    /// Per edge: whether a message is sent and not yet acknowledged.
    in_flight: Vec<AtomicBool>,
    streams: Vec<Option<UnixStream>>,
    goodbyes: Arc<Goodbyes>,
}

/// The processes that have said goodbye.
struct Goodbyes {
    said: Mutex<Vec<bool>>,
    changed: Condvar,
}

/// The socket that a process listens on.
fn address(folder: &Path, process: u32) -> PathBuf {
    folder.join(format!("{process}.socket"))
}

impl Sockets {
    /// Connects process `me` with all others. Their sockets are in `folder`, which only these processes know.
    pub fn connect(folder: &Path, process_map: ProcessMap, me: u32) -> io::Result<Self> {
        let deadline = Instant::now() + START;
        let late = |process: u32| {
            let text = format!("process {process} did not start within {} s", START.as_secs());
            io::Error::new(io::ErrorKind::TimedOut, text)
        };
        let listener = UnixListener::bind(address(folder, me))?;
        listener.set_nonblocking(true)?;
        let mut streams: Vec<Option<UnixStream>> = (0..process_map.processes).map(|_| None).collect();
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
        while let Some(missing) = (me + 1..process_map.processes).find(|&p| streams[p as usize].is_none()) {
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
        Ok(Self { process_map, me, streams })
    }

    /// Runs `work` on a fabric that is connected with the other processes; returns once all have said goodbye.
    pub fn with_fabric<T>(self, fabric: Fabric, work: impl FnOnce(&Fabric) -> T) -> io::Result<T> {
        let goodbyes = Arc::new(Goodbyes {
            said: Mutex::new(self.streams.iter().map(Option::is_none).collect()),
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
        let remote = RemoteProcesses {
            process_map: self.process_map,
            me: self.me,
            writers,
            in_flight: fabric.edges().iter().map(|_| AtomicBool::new(false)).collect(),
            streams: self
                .streams
                .iter()
                .map(|s| s.as_ref().map(UnixStream::try_clone).transpose())
                .collect::<Result<_, _>>()?,
            goodbyes: goodbyes.clone(),
        };
        let fabric = fabric.with_remote(remote);
        Ok(std::thread::scope(|scope| {
            let (fabric, goodbyes, at) = (&fabric, &goodbyes, self.process_map);
            for (process, (stream, frames)) in (0u32..).zip(self.streams.into_iter().zip(outgoing)) {
                let (Some(stream), Some(frames)) = (stream, frames) else { continue };
                let Ok(reading) = stream.try_clone() else {
                    fabric.fail(format!("process {process} cannot be read from"));
                    continue;
                };
                // Write errors are dropped: the reader of a dead process reports it.
                let write = move || {
                    let _ = write_frames(&stream, &frames);
                };
                let read = move || {
                    if let Err(error) = read_frames(reading, fabric, process, at) {
                        let devices = at.devices_of(process);
                        let (first, last) = (devices.start, devices.end - 1);
                        fabric.fail(format!("process {process} (devices {first} to {last}) died: {error}"));
                    }
                    goodbyes.record(process);
                };
                let started = Builder::new().spawn_scoped(scope, write);
                if let Err(error) = started.and_then(|_| Builder::new().spawn_scoped(scope, read)) {
                    fabric.fail(format!("cannot start a thread for messages of process {process}: {error}"));
                    goodbyes.record(process);
                }
            }
            let result = work(fabric);
            fabric.finish();
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

/// Writes queued frames until the goodbye, or until the other process is gone, which its reader notices.
fn write_frames(stream: &UnixStream, frames: &Receiver<Frame>) -> io::Result<()> {
    let mut out = BufWriter::with_capacity(1 << 16, stream);
    while let Ok(frame) = frames.recv() {
        let mut next = Some(frame);
        // All queued frames go out together.
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

/// Reads the frames of another process until its goodbye. An error means that the process died.
fn read_frames(mut stream: UnixStream, fabric: &Fabric, from: u32, at: ProcessMap) -> io::Result<()> {
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
                let edge = edge.ok_or_else(|| bad("an unexpected message"))?;
                let mut buffer = Buffer::zeroed(edge.bytes as usize);
                stream.read_exact(&mut buffer.bytes_mut()[..edge.bytes as usize])?;
                if !fabric.deliver(number, &Arc::new(buffer)) {
                    return Err(bad("a message before the last one was received"));
                }
            }
            ACKNOWLEDGED if edge.is_some() => fabric.acknowledged(number),
            FAILED if length <= LONGEST_REASON => {
                let mut reason = vec![0; length as usize];
                stream.read_exact(&mut reason)?;
                fabric.fail(String::from_utf8_lossy(&reason));
            }
            GOODBYE => return Ok(()),
            _ => return Err(bad("a frame of unknown kind")),
        }
    }
}

impl RemoteProcesses {
    /// Whether a device is in this process.
    pub fn is_here(&self, device: u32) -> bool {
        self.process_map.process(device) == self.me
    }

    fn queue(&self, process: u32, frame: Frame) {
        if let Some(Some(writer)) = self.writers.get(process as usize) {
            // The writer is gone only after its process died, which the reader reports.
            let _ = writer.lock().unwrap_or_else(PoisonError::into_inner).send(frame);
        }
    }

    /// Sends the part of a buffer that the receiver needs; false where the last message is not yet acknowledged.
    pub fn send(&self, number: u32, edge: Edge, buffer: &Buffer, packing: &Packing) -> bool {
        if self.in_flight[number as usize].swap(true, Ordering::AcqRel) {
            return false;
        }
        let mut bytes = vec![0; edge.bytes as usize];
        packing.walk.copy(&mut bytes, buffer.bytes(), packing.size);
        self.queue(self.process_map.process(edge.to), Frame { kind: DATA, number, bytes });
        true
    }

    /// Acknowledges a message to its sender.
    pub fn acknowledge(&self, number: u32, from: u32) {
        self.queue(self.process_map.process(from), Frame { kind: ACKNOWLEDGED, number, bytes: Vec::new() });
    }

    /// Records that the last message along an edge was acknowledged.
    pub fn acknowledged(&self, number: u32) {
        self.in_flight[number as usize].store(false, Ordering::Release);
    }

    /// Tells all other processes to stop, and why.
    pub fn broadcast_failure(&self, reason: &str) {
        let bytes = reason.as_bytes()[..reason.len().min(LONGEST_REASON as usize)].to_vec();
        for process in 0..self.process_map.processes {
            self.queue(process, Frame { kind: FAILED, number: 0, bytes: bytes.clone() });
        }
    }

    /// Says goodbye and waits for the goodbyes of the others; after a failure for `GRACE` at most.
    pub fn finish(&self, stop: &StopSignal) {
        for process in 0..self.process_map.processes {
            self.queue(process, Frame { kind: GOODBYE, number: 0, bytes: Vec::new() });
        }
        self.goodbyes.wait(stop);
        for stream in self.streams.iter().flatten() {
            // It may be closed already, which is the aim.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

impl Goodbyes {
    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<bool>> {
        self.said.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn record(&self, process: u32) {
        self.lock()[process as usize] = true;
        self.changed.notify_all();
    }

    /// Waits for all goodbyes; after a failure only for [`GRACE`], which is enough to report it.
    fn wait(&self, stop: &StopSignal) {
        let mut failed: Option<Instant> = None;
        let mut said = self.lock();
        while said.iter().any(|said| !said) {
            if stop.is_raised() && failed.get_or_insert_with(Instant::now).elapsed() > GRACE {
                return;
            }
            let waited = self.changed.wait_timeout(said, Duration::from_millis(50));
            said = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

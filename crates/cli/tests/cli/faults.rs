//! What goes wrong around the program: it is killed, interrupted, has nobody to talk to, nowhere to write, or little memory.
//!
//! Files are whole whatever happens, exit statuses are the documented ones, and nothing panics.

#![cfg(target_os = "linux")]

use crate::{json, shardwright};
use serde_json::Value;
use std::fs::{File, read, write};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

const MODEL: &str = "mlp:batch=16,hidden=32,layers=3";
/// A search that takes a few seconds.
const SEARCH: [&str; 6] = ["plan", "lenet5:batch=64", "--machine", "h100x64", "--untied", "--json"];

fn program(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_shardwright"));
    command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// A plan in a folder.
fn planned(folder: &Path) -> String {
    let plan = folder.join("plan.json").to_str().unwrap().to_string();
    let made = shardwright(&["plan", MODEL, "--machine", "flat:4", "-o", &plan, "-q"]);
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    plan
}

fn signal(child: &Child, name: &str) {
    // One that has ended by now cannot be told anything, which is fine.
    let _ = Command::new("kill").args([name, &child.id().to_string()]).stderr(Stdio::null()).status();
}

fn calm(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!text.contains("panicked") && output.status.code() != Some(101), "{text}");
    text
}

#[test]
fn a_killed_writer_leaves_the_old_file_or_the_new() {
    const KILLS: u32 = 8;
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_string();
    let plan = planned(folder.path());
    let (out, html, network, trace) = (path("out.json"), path("out.html"), path("net.json"), path("t.json"));
    let writers: [(&[&str], &str); 4] = [
        (&["plan", MODEL, "--machine", "flat:4", "-o", &out], &out),
        (&["report", &plan, "-o", &html], &html),
        (&["network", "vgg16", "--machine", "flat:16", "-o", &network], &network),
        (&["simulate", &plan, "--trace", &trace], &trace),
    ];
    for (args, file) in writers {
        let start = Instant::now();
        assert!(program(args).output().unwrap().status.success(), "{args:?}");
        let whole = start.elapsed();
        let new = read(file).unwrap();
        let old = b"what was there before";
        let mut kept = 0;
        for kill in 0..KILLS {
            write(file, old).unwrap();
            let mut child = program(args).spawn().unwrap();
            // The first kill comes at once, the last ones when it writes or is done.
            std::thread::sleep(whole * kill / (KILLS - 1));
            signal(&child, "-KILL");
            child.wait().unwrap();
            let found = read(file).unwrap();
            kept += u32::from(found == old);
            // Times differ from run to run, and with them the length.
            let complete = found.len() + 200 > new.len() && found.ends_with(&new[new.len() - 2..]);
            assert!(found == old || complete, "{args:?}: {} of {} bytes", found.len(), new.len());
        }
        assert!(kept > 0, "{args:?} was never killed before it had written");
    }
}

#[test]
fn a_full_disk_is_told_and_keeps_the_old_file() {
    let folder = tempfile::tempdir().unwrap();
    let plan = planned(folder.path());
    let file = folder.path().join("out.json");
    write(&file, "old").unwrap();
    // A limit on the size of files, which the program is told of as of a full disk.
    let limited = |args: &[&str]| {
        let mut command = Command::new("sh");
        command.args([
            "-c",
            "trap '' XFSZ; ulimit -f 1; exec \"$0\" \"$@\"",
            env!("CARGO_BIN_EXE_shardwright"),
        ]);
        command.args(args).arg("-o").arg(&file).output().unwrap()
    };
    let writers: [&[&str]; 3] = [
        &["plan", MODEL, "--machine", "flat:4"],
        &["report", &plan],
        &["network", MODEL, "--machine", "flat:4"],
    ];
    for args in writers {
        let output = limited(args);
        let text = calm(&output);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {text}");
        assert!(text.contains("cannot write") && text.contains("out.json"), "{args:?}: {text}");
        assert_eq!(read(&file).unwrap(), b"old", "{args:?}");
    }
    let left: Vec<_> = std::fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(left.len(), 2, "{left:?}");
    // Standard output on a full disk.
    for args in PRINTING {
        let output = program(args).stdout(File::options().write(true).open("/dev/full").unwrap()).output();
        let output = output.unwrap();
        assert!(calm(&output).contains("No space left"), "{args:?}");
        assert_eq!(output.status.code(), Some(2), "{args:?}");
    }
}

#[test]
fn what_cannot_be_written_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let inside = folder.path().to_str().unwrap();
    for file in ["/proc/out.json", "/nowhere/out.json", inside] {
        let output = shardwright(&["plan", MODEL, "--machine", "flat:2", "-q", "-o", file]);
        let text = calm(&output);
        assert_eq!(output.status.code(), Some(2), "{text}");
        assert!(text.contains(&format!("cannot write {file}")), "{text}");
    }
}

#[test]
fn links_are_followed_and_pipes_stay_pipes() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    write(path("real.json"), "old").unwrap();
    std::os::unix::fs::symlink(path("real.json"), path("link.json")).unwrap();
    let to = |file: &Path| {
        let file = file.to_str().unwrap();
        let output = shardwright(&["plan", MODEL, "--machine", "flat:2", "-q", "-o", file]);
        assert!(output.status.success(), "{}", calm(&output));
    };
    to(&path("link.json"));
    assert!(path("link.json").symlink_metadata().unwrap().is_symlink());
    assert!(read(path("real.json")).unwrap().starts_with(b"{"));
    // A pipe with a name, and by a link as `/dev/stdout` is one.
    assert!(Command::new("mkfifo").arg(path("pipe")).status().unwrap().success());
    std::os::unix::fs::symlink(path("pipe"), path("out")).unwrap();
    let pipe = path("pipe");
    let reader = std::thread::spawn(move || read(pipe).unwrap());
    to(&path("out"));
    assert!(!path("pipe").metadata().unwrap().is_file());
    assert!(reader.join().unwrap().starts_with(b"{"));
}

/// Commands that print, and need nothing but a name.
const PRINTING: &[&[&str]] = &[
    &["models"],
    &["models", "--json"],
    &["machines"],
    &["machines", "p100x16"],
    &["solvers"],
    &["plan", MODEL, "--machine", "flat:2"],
    &["plan", MODEL, "--machine", "flat:2", "--json"],
    &["compare", MODEL, "--machine", "flat:2", "--time", "1"],
    &["run", MODEL, "--machine", "cpu:2", "--solver", "data", "--steps", "2"],
];

#[test]
fn nobody_who_reads_is_no_error() {
    let folder = tempfile::tempdir().unwrap();
    let plan = planned(folder.path());
    let network = folder.path().join("net.json").to_str().unwrap().to_string();
    assert!(shardwright(&["network", MODEL, "--machine", "flat:2", "-o", &network]).status.success());
    let more: [&[&str]; 7] = [
        &["simulate", &plan],
        &["simulate", &plan, "--json"],
        &["explain", &plan],
        &["diff", &plan, &plan],
        &["solve", &network],
        &["run", &plan, "--steps", "2", "--json"],
        &["--help"],
    ];
    for args in PRINTING.iter().copied().chain(more) {
        let mut child = program(args).spawn().unwrap();
        drop(child.stdout.take());
        let output = child.wait_with_output().unwrap();
        // `compare` says first how long it takes.
        let text = calm(&output);
        let rest = text.split_once("rows come as they are found").map_or(&text[..], |(_, rest)| rest);
        assert_eq!((output.status.code(), rest.trim()), (Some(0), ""), "{args:?}: {text}");
    }
    // With nobody to hear a complaint, the exit status says it all.
    for args in
        [&["plan", "no-such-model"][..], &["solve", "no-such-file"], &["plan", MODEL, "--memory", "1kB"]]
    {
        let mut child = program(args).spawn().unwrap();
        drop((child.stdout.take(), child.stderr.take()));
        let status = child.wait().unwrap();
        assert!(matches!(status.code(), Some(1 | 2)), "{args:?}: {status}");
    }
}

#[test]
fn an_interrupt_at_any_moment_gives_a_whole_plan_or_none() {
    for delay in [0, 30, 100, 250, 500, 900, 1500] {
        let mut child = program(&SEARCH).args(["--time", "3600"]).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(delay));
        signal(&child, "-INT");
        let output = ended(&mut child, Duration::from_secs(100));
        let text = calm(&output);
        match (output.status.code(), output.status.signal()) {
            (Some(0), _) => {
                let plan: Value = serde_json::from_slice(&output.stdout).unwrap();
                assert!(plan["objective"].as_i64().unwrap() > 0, "after {delay} ms");
            }
            // Before anything was searched.
            (None, Some(2)) => assert!(output.stdout.is_empty(), "after {delay} ms"),
            other => panic!("{other:?} after {delay} ms: {text}"),
        }
    }
}

#[test]
fn an_interrupted_run_ends() {
    let run = ["run", MODEL, "--machine", "cpu:2", "--steps", "1000000", "--no-verify"];
    for delay in [100, 1000] {
        let mut child = program(&run).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(delay));
        signal(&child, "-INT");
        std::thread::sleep(Duration::from_secs(1));
        // One that came while the plan was made only ended that.
        signal(&child, "-INT");
        let output = ended(&mut child, Duration::from_secs(30));
        calm(&output);
        assert!(output.status.code() == Some(130) || output.status.signal() == Some(2), "{output:?}");
    }
}

/// What a process says in the end, which must come.
fn ended(child: &mut Child, patience: Duration) -> Output {
    use std::io::Read;
    let (mut out, mut err) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
    let reader = std::thread::spawn(move || {
        let mut text = Vec::new();
        out.read_to_end(&mut text).map(|_| text)
    });
    let deadline = Instant::now() + patience;
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if Instant::now() > deadline {
            child.kill().unwrap();
            panic!("it hangs");
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    let mut stderr = Vec::new();
    err.read_to_end(&mut stderr).unwrap();
    Output { status, stdout: reader.join().unwrap().unwrap(), stderr }
}

/// A search that holds twice as much where it may.
#[test]
fn tables_keep_to_the_memory_that_they_are_allowed() {
    let model = [
        "plan",
        "gpt:layers=1,attention=plain",
        "--machine",
        "p100x16",
        "--batch",
        "128",
        "--solver",
        "exact",
    ];
    let model = [&model[..], &["--threads", "2"]].concat();
    let held = |more: &[&str]| {
        let plan = json(&[&model[..], &["--json"], more].concat());
        plan["planning_memory_bytes"].as_u64().unwrap() >> 20
    };
    let (free, limited) = (held(&[]), held(&["--ram", "16MiB"]));
    assert!(limited < free * 3 / 4 && limited < 16 + 48, "{limited} MiB, and {free} without a limit");
    // No more is even asked for: where the system allows no more, it ends as usual.
    let output = Command::new("sh")
        .args(["-c", "ulimit -v 600000; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_shardwright")])
        .args(&model)
        .args(["-q", "--ram", "16MiB"])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", calm(&output));
    let refused = shardwright(&[&model[..], &["--ram", "1kB"]].concat());
    let text = calm(&refused);
    assert!(refused.status.code() == Some(1) && text.contains("allow more (--ram)"), "{text}");
}

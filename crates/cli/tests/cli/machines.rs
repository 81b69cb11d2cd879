//! The `machines` command from outside.

use crate::shardwright;

fn run(args: &[&str]) -> (i32, String, String) {
    let output = shardwright(args);
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code().unwrap_or(-1), text(&output.stdout), text(&output.stderr))
}

#[test]
fn the_list_names_every_builtin() {
    let (status, out, _) = run(&["machines"]);
    assert_eq!(status, 0);
    for name in
        ["p100x16", "k80x64", "k80x8", "1080tix64", "2080tix64", "a100x64", "h100x64", "h200x64", "b200x64"]
    {
        assert!(out.contains(name), "{name} is listed in\n{out}");
    }
}

#[test]
fn json_is_one_value_with_the_whole_description() {
    let (status, out, _) = run(&["machines", "--json"]);
    assert_eq!(status, 0);
    let list: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(list[0]["name"], "p100x16");
    assert_eq!(list[0]["devices"], 16);
    assert_eq!(list[0]["axes"][0]["name"], "node.0");
    let (_, out, _) = run(&["machines", "p100x16:4", "--json"]);
    let one: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(one["devices"], 4);
}

#[test]
fn a_named_machine_prints_a_file_that_can_be_used() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["p100x16", "1080tix64:16", "flat:6"] {
        let (status, text, _) = run(&["machines", name]);
        assert_eq!(status, 0);
        let path = folder.path().join("m.toml");
        std::fs::write(&path, &text).unwrap();
        let (status, again, errors) = run(&["machines", path.to_str().unwrap(), "--json"]);
        assert_eq!(status, 0, "{errors}");
        let (_, direct, _) = run(&["machines", name, "--json"]);
        assert_eq!(again, direct);
    }
}

#[test]
fn mistakes_end_with_status_two_and_say_where() {
    let (status, out, errors) = run(&["machines", "p100"]);
    assert_eq!((status, out.as_str()), (2, ""));
    assert!(errors.contains("there is no machine `p100`"), "{errors}");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.toml");
    std::fs::write(&path, "extends = \"p100x16\"\n\n[[level]]\nname = \"node\"\nbandwidth = \"-1 GB/s\"\n")
        .unwrap();
    let (status, _, errors) = run(&["machines", path.to_str().unwrap()]);
    assert_eq!(status, 2);
    assert!(errors.contains("m.toml:5: `level[0].bandwidth`: -1000000000 B/s is not possible"), "{errors}");
}

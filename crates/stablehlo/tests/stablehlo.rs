//! Training steps as JAX lowers them: imported, run by the serial interpreter, and compared with JAX's results.
//!
//! `scripts/stablehlo_cases.py` writes and describes the cases.

use flate2::read::GzDecoder;
use proptest::prelude::*;
use shardwright_graph::{DType, Op, Phase, Role, Shape, TensorId};
use shardwright_runtime::{Data, HostTensor, Serial};
use shardwright_stablehlo::{ImportOptions, ImportedProgram, StablehloError, import, normalise};
use std::{io::Read, path::PathBuf};

fn unpack(name: &str) -> String {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/stablehlo").join(name);
    let file = std::fs::File::open(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let mut text = String::new();
    GzDecoder::new(file).read_to_string(&mut text).unwrap();
    text
}

fn read(case: &str) -> ImportedProgram {
    read_with(case, true)
}

fn read_with(case: &str, fuse_attention: bool) -> ImportedProgram {
    let options = ImportOptions { fuse_attention, ..ImportOptions::default() };
    import(&unpack(&format!("{case}.mlir.gz")), case, &options).unwrap_or_else(|e| panic!("{e}"))
}

/// The number of ops of a kind.
fn count(program: &ImportedProgram, kind: &str) -> usize {
    program.graph.ops.iter().filter(|node| node.op.kind() == kind).count()
}

/// A tensor of these numbers; unsigned ones wrap.
fn value(dtype: DType, shape: &Shape, numbers: &[f64]) -> HostTensor {
    let data = match dtype {
        DType::F32 => Data::F32(numbers.iter().map(|&x| x as f32).collect()),
        DType::I32 => Data::I32(numbers.iter().map(|&x| x as i64 as i32).collect()),
        DType::Bool => Data::Bool(numbers.iter().map(|&x| u8::from(x != 0.0)).collect()),
        other => panic!("no case has {other} arguments"),
    };
    HostTensor::new(shape.clone(), data)
}

/// Runs a case and compares every result with JAX's.
fn check(case: &str, tolerance: f64) {
    check_program(case, read(case), tolerance);
}

fn check_program(case: &str, program: ImportedProgram, tolerance: f64) {
    let ImportedProgram { graph, arguments, results, notes, .. } = program;
    assert_eq!(notes.iter().filter(|n| n.contains("opaque")).count(), 0, "{case}: {notes:?}");
    let stored: serde_json::Value = serde_json::from_str(&unpack(&format!("{case}.json.gz"))).unwrap();
    let lists = |key: &str| -> Vec<Vec<f64>> {
        let number = |x: &serde_json::Value| x.as_f64().unwrap_or(f64::NAN);
        let list = |x: &serde_json::Value| x.as_array().unwrap().iter().map(number).collect();
        stored[key].as_array().unwrap().iter().map(list).collect()
    };
    let mut serial = Serial::new(&graph, 1, &results);
    let inputs = lists("inputs");
    assert_eq!(arguments.len(), inputs.len(), "{case}");
    for (t, numbers) in arguments.into_iter().zip(inputs) {
        let ty = &graph.tensor(t).ty;
        serial.set(t, value(ty.dtype, &ty.shape, &numbers)).unwrap();
    }
    serial.evaluate().unwrap_or_else(|e| panic!("{case}: {e}"));
    let expected = lists("outputs");
    assert_eq!(results.len(), expected.len(), "{case}");
    for (i, (&t, expected)) in results.iter().zip(&expected).enumerate() {
        let actual = serial.value(t).unwrap().to_f64_vec();
        assert_eq!(actual.len(), expected.len(), "{case} result {i}");
        let scale = expected.iter().fold(1.0f64, |m, x| if x.is_finite() { m.max(x.abs()) } else { m });
        for (a, e) in actual.iter().zip(expected) {
            // Unsigned results are stored as the signed numbers with the same bits.
            let wrapped =
                if graph.tensor(t).ty.dtype == DType::I32 { f64::from(*e as i64 as i32) } else { *e };
            let same = a == e || *a == wrapped || (a.is_nan() && e.is_nan());
            assert!(same || (a - e).abs() <= tolerance * scale, "{case} result {i}: {a}, JAX has {e}");
        }
    }
}

#[test]
fn an_mlp_with_sgd_steps_as_in_jax() {
    check("mlp_sgd", 1e-6);
    check("named_mlp_sgd", 1e-6);
}

#[test]
fn convolutions_and_pooling_step_as_in_jax() {
    check("cnn_sgd", 1e-5);
    check("conv_nchw", 1e-5);
}

#[test]
fn a_transformer_with_adam_steps_as_in_jax() {
    check("gpt_adam", 2e-5);
}

#[test]
fn attention_is_fused_forwards_and_backwards() {
    // The scanned transformer computes its blocks again: a forward pass, and a forward and backward pass, per block.
    for (case, forward, backward, tolerance) in [
        ("attention", 5, 5, 1e-5),
        ("attention_bf16", 1, 1, 1e-2),
        ("gpt_adam", 2, 2, 1e-5),
        ("scan_transformer", 6, 3, 1e-5),
    ] {
        let (fused, plain) = (read(case), read_with(case, false));
        assert_eq!(
            (count(&fused, "attention"), count(&fused, "attention_grad")),
            (forward, backward),
            "{case}"
        );
        let notes = fused.notes.join("\n");
        assert!(notes.contains("--plain-attention"), "{case}: {notes}");
        assert_eq!((count(&plain, "attention"), plain.notes.join("").contains("attention")), (0, false));
        check_program(case, fused, tolerance);
        check_program(case, plain, tolerance);
    }
}

#[test]
fn calls_to_cudnn_are_attention() {
    let program = read_with("attention_cudnn", false);
    assert_eq!((count(&program, "attention"), count(&program, "attention_grad")), (1, 1));
    assert_eq!(count(&program, "transpose"), 0, "{}", program.graph);
    check_program("attention_cudnn", program, 1e-2);
    let text = unpack("attention_cudnn.mlir.gz");
    let refused = |from: &str, to: &str| {
        import(&text.replace(from, to), "step", &ImportOptions::default()).unwrap_err().reason
    };
    let padded = refused("CAUSAL", "PADDING");
    assert!(padded.contains("__cudnn$fmhaSoftmax") && padded.contains("PADDING"), "{padded}");
    let kernel = refused("__cudnn$fmhaSoftmax", "tpu_custom_call");
    assert!(kernel.contains("Pallas") && kernel.contains("dot_product_attention"), "{kernel}");
}

/// A call to a kernel with these types, as JAX 0.10 lowers it for TPUs, without the kernel's code.
fn kernel_call(name: &str, operands: &[&str], results: &[&str]) -> String {
    let tensor = |ty: &&str| format!("tensor<{ty}>");
    let types = |list: &[&str]| list.iter().map(tensor).collect::<Vec<_>>().join(", ");
    let names: Vec<String> = (0..operands.len()).map(|i| format!("%a{i}")).collect();
    let arguments: Vec<String> =
        names.iter().zip(operands).map(|(name, ty)| format!("{name}: {}", tensor(ty))).collect();
    let made = match results {
        [_] => ("%0".to_string(), "%0".to_string()),
        _ => {
            let all: Vec<String> = (0..results.len()).map(|i| format!("%0#{i}")).collect();
            (format!("%0:{}", results.len()), all.join(", "))
        }
    };
    format!(
        "module {{ func.func public @main({}) -> ({}) {{
           {} = stablehlo.custom_call @tpu_custom_call({}) {{backend_config = \"\", kernel_name = \"{name}\"}} : ({}) -> ({})
           return {} : {} }} }}",
        arguments.join(", "),
        types(results),
        made.0,
        names.join(", "),
        types(operands),
        types(results),
        made.1,
        types(results),
    )
}

/// The rule of the only call in a program, its workload and its flops.
fn call_work(program: &ImportedProgram) -> (String, Option<(&'static str, Vec<u64>)>, u64) {
    let graph = &program.graph;
    let op = graph.op_ids().find(|&op| graph.node(op).op.kind() == "opaque").unwrap();
    let types = |ids: &[TensorId]| ids.iter().map(|&t| graph.tensor(t).ty.clone()).collect::<Vec<_>>();
    let node = graph.node(op);
    let (inputs, outputs) = (types(&node.inputs), types(&node.outputs));
    let work = node.op.operator().workload(&inputs, &outputs);
    let work = work.map(|(class, sizes)| (class.name, sizes.to_vec()));
    (graph.rule(op).to_string(), work, node.op.operator().flops(&inputs, &outputs))
}

#[test]
fn attention_kernels_of_pallas_split_samples_and_heads() {
    let (q, k, lse) = ("2x4x1024x128xbf16", "2x4x512x128xbf16", "2x4x1024x128xf32");
    let (segments, keys) = ("2x1024x128xi32", "2x8x512xi32");
    let (gq, gk, glse) = ("2x1024x4x64xf16", "2x512x4x64xf16", "2x4x1024xf32");
    let (sq, sk, scratch) = ("3x4x256x128xbf16", "3x4x256x128xbf16", "3x128x128xf32");
    let (table, tables) = ("1x2x2xi8", "4x2x2xi8");
    let both = "{d0=2, d1=4}";
    let product = 2 * 2 * 4 * 1024 * 512;
    for (name, operands, results, factors, class, flops) in [
        ("_flash_attention_kernel", vec![q, k, k], vec![q], both, "attention", product * 2 * 128),
        (
            "_flash_attention_kernel",
            vec![q, k, k, segments, keys],
            vec![q, lse, lse],
            both,
            "attention",
            product * 2 * 128,
        ),
        (
            "_flash_attention_dkv_kernel",
            vec![q, k, k, lse, lse, q, lse],
            vec![k, k],
            both,
            "attention",
            product * 4 * 128,
        ),
        (
            "_flash_attention_dq_kernel",
            vec![q, k, k, lse, lse, q, lse],
            vec![q],
            both,
            "attention",
            product * 3 * 128,
        ),
        ("mha_forward", vec![gq, gk, gk], vec![gq, glse], both, "attention", product * 2 * 64),
        ("mha_forward", vec![gq, gk, gk, "2x1024xi32"], vec![gq], both, "attention", product * 2 * 64),
        (
            "mha_backward",
            vec![gq, gk, gk, gq, gq, glse, glse],
            vec![gq, gk, gk],
            both,
            "attention_grad",
            product * 5 * 64,
        ),
        ("mha_preprocess_backward", vec![gq, gq], vec![glse], both, "", 0),
        (
            "splash_mha_fwd_no_residuals",
            vec![table, table, sq, sk, sk],
            vec![scratch, sq],
            "{d0=3, d1=4}",
            "attention",
            2 * 3 * 4 * 256 * 256 * 2 * 128,
        ),
        (
            "splash_mha_fwd_no_residuals",
            vec![tables, tables, sq, sk, sk],
            vec![scratch, sq],
            "{d0=3, d1=4}",
            "attention",
            2 * 3 * 4 * 256 * 256 * 2 * 128,
        ),
    ] {
        let program =
            import(&kernel_call(name, &operands, &results), "step", &ImportOptions::default()).unwrap();
        let (rule, work, found) = call_work(&program);
        assert!(rule.ends_with(factors), "{name}: {rule}");
        assert_eq!((work.map_or("", |(class, _)| class), found), (class, flops), "{name}");
        let notes = program.notes.join(" ");
        assert!(notes.contains("by its name") && notes.contains("without a mask") == (flops > 0), "{notes}");
    }
    // Tables per head are split as heads are.
    let text = kernel_call("splash_mha_fwd", &[tables, sq, sk, sk], &[sq]);
    let (rule, ..) = call_work(&import(&text, "step", &ImportOptions::default()).unwrap());
    assert!(rule.starts_with("([d1, _, _], [d0, d1, _, _]"), "{rule}");
}

#[test]
fn attention_kernels_with_other_operands_need_a_rule() {
    let (q, k) = ("2x4x1024x128xbf16", "2x2x512x128xbf16");
    for (name, operands, results) in [
        ("_flash_attention_kernel", vec![q, k, k], vec![q]),
        ("_flash_attention_kernel", vec![q, q, q], vec!["2x1024x512xbf16"]),
        ("mha_forward", vec![q, q, q], vec!["4x1024xbf16"]),
        ("splash_mha_fwd", vec!["3x2x2xi8", q, q, q], vec![q]),
        ("_flash_attention_kernel", vec!["4xi32"], vec!["4xi32"]),
    ] {
        let text = kernel_call(name, &operands, &results);
        let error = import(&text, "step", &ImportOptions::default()).unwrap_err().reason;
        assert!(error.contains("attention kernel") && error.contains(&format!("--rule '{name}=")), "{error}");
    }
    let rules =
        vec![("_flash_attention_kernel".to_string(), "b h _ _, b _ _ _, b _ _ _ -> b h _ _".to_string())];
    let text = kernel_call("_flash_attention_kernel", &[q, k, k], &[q]);
    let program = import(&text, "step", &ImportOptions { rules, ..ImportOptions::default() }).unwrap();
    assert!(call_work(&program).0.ends_with("{d0=2, d1=4}"));
    let other =
        import(&kernel_call("my_kernel", &[q], &[q]), "step", &ImportOptions::default()).unwrap_err().reason;
    assert!(other.contains("compiled from Pallas or Triton") && other.contains("my_kernel"), "{other}");
}

/// Calls of Python's planned programs state rule and kernel.
#[test]
fn stated_rules_of_attention_kernels_keep_their_work() {
    let text = kernel_call("x", &["2x4x64x16xf32"; 3], &["2x4x64x16xf32"])
        .replace("tpu_custom_call", "shardwright.pallas_call");
    let stated = "mhlo.backend_config = {kernel = \"_flash_attention_kernel\", rule = \"b h _ _, b h _ _, b h _ _ -> b h _ _\"}";
    let text = text.replace("kernel_name = \"x\"", stated);
    let (rule, work, _) = call_work(&import(&text, "step", &ImportOptions::default()).unwrap());
    assert!(rule.ends_with("{d0=2, d1=4}"), "{rule}");
    assert_eq!(work, Some(("attention", vec![8, 1, 64, 64, 16, 16])));
}

#[test]
fn causal_masks_and_windows_are_attributes() {
    let program = read("attention");
    let masks = program.graph.ops.iter().filter_map(|node| match &node.op {
        Op::Attention(op) => Some((op.before, op.after, node.inputs.len())),
        _ => None,
    });
    assert_eq!(
        masks.collect::<Vec<_>>(),
        [(None, Some(0), 3), (Some(2), Some(0), 3), (None, None, 3), (None, None, 4), (None, None, 3)]
    );
}

#[test]
fn operands_inside_attention_are_those_of_the_fused_op() {
    let program = read("gpt_adam");
    for node in program.graph.op_ids().filter(|&op| program.graph.node(op).op.kind().starts_with("attention"))
    {
        let reads = |input: usize| {
            let uses = program.sites.iter().flat_map(|site| site.operands.iter().flatten());
            uses.filter(|used| used.op == node && used.input == input).count()
        };
        assert!((0..3).all(|input| reads(input) > 0), "{:?}", program.graph.node(node));
    }
}

#[test]
fn scans_step_as_in_jax() {
    check("scan_rnn", 1e-5);
    check("scan_transformer", 1e-5);
}

#[test]
fn a_mixture_of_experts_steps_as_in_jax() {
    check("moe", 1e-5);
}

#[test]
fn indexing_steps_as_in_jax() {
    check("indexing", 1e-6);
}

#[test]
fn random_numbers_are_those_of_jax() {
    check("dropout", 1e-5);
}

#[test]
fn sorting_and_row_operations_give_what_jax_gives() {
    check("rows", 1e-6);
}

#[test]
fn element_wise_operations_give_what_jax_gives() {
    check("elements", 1e-5);
}

#[test]
fn operations_that_move_elements_give_what_jax_gives() {
    check("shapes", 1e-6);
}

/// All texts of the folder.
fn texts() -> Vec<(String, String)> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/stablehlo");
    let mut names: Vec<String> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.ends_with(".mlir.gz"))
        .collect();
    names.sort();
    assert!(names.len() >= 13);
    names.into_iter().map(|name| (name.clone(), unpack(&name))).collect()
}

#[test]
fn the_generic_form_reads_like_the_short_one() {
    for (name, text) in texts() {
        let generic = normalise(&text, &name).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(normalise(&generic, "generic").as_ref(), Ok(&generic), "{name}");
        let [short, long] =
            [&text, &generic].map(|t| import(t, &name, &ImportOptions::default()).unwrap().graph);
        assert_eq!(short, long, "{name}");
    }
}

#[test]
fn a_text_cut_anywhere_is_explained_and_never_accepted() {
    for (name, text) in texts() {
        // Up to the module's last brace.
        let end = text.trim_end().rfind("\n}").unwrap() + 1;
        for cut in (0..end).step_by(499).filter(|&cut| text.is_char_boundary(cut)) {
            let error = import(&text[..cut], "cut", &ImportOptions::default()).err();
            let StablehloError { line, column, .. } = error.unwrap_or_else(|| panic!("{name} cut at {cut}"));
            assert!(line >= 1 && column >= 1 && line <= text[..cut].lines().count() + 1);
        }
    }
}

#[test]
fn roles_follow_from_use() {
    let graph = read("gpt_adam").graph;
    let count = |role: Role| graph.sources(role).count();
    // Embedding, positions, two blocks of eight; two moments of each, and the step count.
    assert_eq!((count(Role::Parameter), count(Role::OptimizerState), count(Role::Input)), (18, 37, 1));
    assert_eq!(graph.carries.len(), 55);
    let names: Vec<&str> = graph.parameters().map(|t| &graph.tensor(t).name[..]).collect();
    assert!(names.contains(&"0.blocks.1.qkv") && names.contains(&"0.embed"), "{names:?}");
    let named = read("named_mlp_sgd").graph;
    let names: Vec<&str> = named.parameters().map(|t| &named.tensor(t).name[..]).collect();
    assert_eq!(names, ["params.b1", "params.w1", "params.w2"]);
    assert_eq!(named.outputs.len(), 1, "the loss alone is not a next value");
}

#[test]
fn roles_may_be_told() {
    let text = unpack("mlp_sgd.mlir.gz");
    let told = |pattern: &str, role| {
        let options = ImportOptions { roles: vec![(pattern.to_string(), role)], ..ImportOptions::default() };
        import(&text, "mlp", &options).map(|i| i.graph)
    };
    let frozen = told("1.w*", Role::Input).unwrap();
    assert_eq!(frozen.parameters().count(), 1);
    assert_eq!(frozen.carries.len(), 1);
    let by_position = told("arg0", Role::Constant).unwrap();
    assert_eq!(by_position.sources(Role::Parameter).count(), 2);
    let unknown = told("nobody", Role::Input).unwrap_err();
    assert!(unknown.reason.contains("no argument is called `nobody`"), "{unknown}");
}

#[test]
fn iterations_of_a_loop_share_their_layers() {
    let graph = read("scan_transformer").graph;
    let tied = graph.ops.len() - graph.layers.len();
    // Three iterations forwards and three backwards: about two thirds of the loop's ops join the first one's layer.
    assert!(tied * 3 > graph.ops.len(), "{} ops in {} layers", graph.ops.len(), graph.layers.len());
    assert!(graph.ops.iter().all(|node| node.phase == Phase::Forward));
    for node in &graph.ops {
        let forward = graph.node(graph.layers[node.layer.index()].forward);
        assert_eq!(forward.op.kind(), node.op.kind());
    }
}

/// The error of a small program, with its position.
fn refusal(body: &str) -> String {
    let text = format!(
        "module @m {{\n  func.func public @main(%x: tensor<4x8xf32>) -> tensor<4x8xf32> {{\n{body}\n  }}\n}}\n"
    );
    import(&text, "m.mlir", &ImportOptions::default()).unwrap_err().to_string()
}

#[test]
fn mistakes_are_explained_with_line_and_column() {
    let ends = "    return %0 : tensor<4x8xf32>";
    for (body, expected) in [
        ("    %0 = stablehlo.tanh %y : tensor<4x8xf32>", "m.mlir:3:25: there is no value `%y` here"),
        (
            "    %0 = stablehlo.tanh %x : tensor<4x9xf32>",
            "m.mlir:3:25: the value has type f32[4,8], but the text says f32[4,9]",
        ),
        (
            "    %0 = stablehlo.tanh %x : (tensor<4x8xf32>) -> tensor<8x4xf32>",
            "m.mlir:3:10: stablehlo.tanh: the result has type f32[4,8]",
        ),
        (
            "    %0 = linalg.matmul %x : tensor<4x8xf32>",
            "m.mlir:3:10: linalg.matmul: this operation is not StableHLO",
        ),
        (
            "    %0 = stablehlo.fft %x : tensor<4x8xf32>",
            "m.mlir:3:10: stablehlo.fft: this operation is not supported",
        ),
        (
            "    %0 = stablehlo.tanh %x : tensor<4x8xcomplex<f32>>",
            "m.mlir:3:36: tensor<4x8xcomplex<f32>> is not a tensor type",
        ),
        (
            "    %0 = stablehlo.tanh %x : tensor<?x8xf32>",
            "has a size that is not known; lower the function with concrete shapes",
        ),
        (
            "    %0 = stablehlo.convert %x : (tensor<4x8xf32>) -> tensor<4x8xi7>",
            "element type `i7` is not supported",
        ),
        ("    %0 = call @nobody(%x) : (tensor<4x8xf32>) -> tensor<4x8xf32>", "there is no function @nobody"),
        ("    %0 = call @main(%x) : (tensor<4x8xf32>) -> tensor<4x8xf32>", "function @main calls itself"),
        (
            "    %0 = stablehlo.custom_call @magic(%x) : (tensor<4x8xf32>) -> tensor<4x8xf32>",
            "`--opaque magic`",
        ),
        ("    %0:2 = stablehlo.tanh %x : tensor<4x8xf32>", "has 1 results, but 2 are named"),
        (
            "    %0 = stablehlo.transpose %x, dims = [0, 0] : (tensor<4x8xf32>) -> tensor<4x8xf32>",
            "are not dimensions of a tensor of rank 2",
        ),
        (
            "    %c = stablehlo.constant dense_resource<__elided__> : tensor<4x8xf32>",
            "the values of this constant are not in the text",
        ),
        ("    %c = stablehlo.constant dense<[1.0, 2.0]> : tensor<3xf32>", "2 elements do not fit f32[3]"),
        (
            "    %0 = \"stablehlo.tanh\"(%x) : (tensor<4x8xf32>, tensor<f32>) -> tensor<4x8xf32>",
            "has 1 operands, but 2 types",
        ),
        ("    %0 = stablehlo.tanh %x : tensor<18446744073709551616x8xf32>", "m.mlir:3:25"),
    ] {
        let error = refusal(&format!("{body}\n{ends}"));
        assert!(error.contains(expected), "{body}\n  gives {error}\n  not   {expected}");
    }
    let data_dependent = "    %0 = stablehlo.while(%a = %x) : tensor<4x8xf32>\n    cond {\n      %c = stablehlo.constant dense<0.0> : tensor<f32>\n      %s = stablehlo.reduce(%a init: %c) applies stablehlo.add across dimensions = [0, 1] : (tensor<4x8xf32>, tensor<f32>) -> tensor<f32>\n      %p = stablehlo.compare LT, %s, %c : (tensor<f32>, tensor<f32>) -> tensor<i1>\n      stablehlo.return %p : tensor<i1>\n    } do {\n      stablehlo.return %a : tensor<4x8xf32>\n    }";
    assert!(
        refusal(&format!("{data_dependent}\n{ends}"))
            .contains("the number of iterations of this loop depends on data")
    );
}

#[test]
fn absurd_nesting_and_endless_loops_are_refused() {
    let deep = format!("module attributes {{a = {}1{}}} {{}}", "[".repeat(100_000), "]".repeat(100_000));
    let error = import(&deep, "deep", &ImportOptions::default()).unwrap_err();
    assert!(error.reason.contains("nested more than"), "{error}");
    let regions = format!("module {{ {}", "\"a.b\"() ({ ".repeat(100_000));
    assert!(
        import(&regions, "deep", &ImportOptions::default()).unwrap_err().reason.contains("nested more than")
    );
    // Many operations per iteration: iterations count like operations, and take longer.
    let value = |i: u32| if i == 0 { "a".to_string() } else { format!("v{i}") };
    let barrier = |i: u32| {
        format!("      %v{} = stablehlo.optimization_barrier %{} : tensor<4x8xf32>\n", i + 1, value(i))
    };
    let body: String = (0..500).map(barrier).collect();
    let endless = format!(
        "    %t = stablehlo.constant dense<true> : tensor<i1>
    %0 = stablehlo.while(%a = %x) : tensor<4x8xf32>
    cond {{
      stablehlo.return %t : tensor<i1>
    }} do {{
{body}      stablehlo.return %v500 : tensor<4x8xf32>
    }}
    return %0 : tensor<4x8xf32>"
    );
    assert!(refusal(&endless).contains("plan a step with fewer iterations"));
    for text in ["", "module", "module {", "module {}", "\u{1F600}", "{", "#"] {
        assert!(import(text, "t", &ImportOptions::default()).is_err(), "{text}");
    }
}

/// A text with a few of its words, numbers or brackets changed.
fn damaged(text: &str, changes: &[(usize, usize, u8)]) -> String {
    let mut bytes = text.as_bytes().to_vec();
    for &(at, from, kind) in changes {
        let (at, from) = (at % bytes.len(), from % bytes.len());
        match kind % 4 {
            0 => bytes[at] = bytes[from],
            1 => {
                bytes.remove(at);
            }
            2 => bytes[at] = b"0123456789x<>(){}[],:%#@\"-="[from % 27],
            // A duplicated line in the wrong position.
            _ => {
                let end =
                    bytes[from..].iter().position(|&b| b == b'\n').map_or(bytes.len(), |n| from + n + 1);
                let line = bytes[from..end].to_vec();
                bytes.splice(at..at, line);
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// A call with a rule, stated in its configuration or by the user, is split along the dimensions that it shares.
#[test]
fn calls_with_rules_are_split_by_them() {
    let text = |config: &str| {
        format!(
            "module @step {{ func.func public @main(%x: tensor<8x4xf32>) -> tensor<8x2xf32> {{
                %0 = stablehlo.custom_call @kernel(%x) {{{config}}} : (tensor<8x4xf32>) -> tensor<8x2xf32>
                return %0 : tensor<8x2xf32>
            }} }}"
        )
    };
    let stated = text("mhlo.backend_config = {rule = \"n _ -> n _\"}");
    let given =
        ImportOptions { rules: vec![("kernel".into(), "n d -> n e".into())], ..ImportOptions::default() };
    for (text, options) in [(&stated, ImportOptions::default()), (&text(""), given)] {
        let graph = import(text, "step.mlir", &options).unwrap().graph;
        assert_eq!(graph.rule(graph.op_ids().next().unwrap()).to_string(), "([d0, _])->([d0, _]) {d0=8}");
    }
    for wrong in ["n", "n _ ->", "n -> n _", "_ n -> n _", "n n -> n n"] {
        let options =
            ImportOptions { rules: vec![("kernel".into(), wrong.into())], ..ImportOptions::default() };
        let error = import(&text(""), "step.mlir", &options).unwrap_err();
        assert_eq!(error.line, 2, "{error}");
    }
}

/// Narrow numbers are planned as wider ones, with a note.
#[test]
fn narrow_numbers_are_planned_as_wider_ones() {
    let text = "module @step { func.func public @main(%x: tensor<8x4xui8>) -> tensor<8x4xf32> {
        %0 = stablehlo.convert %x : (tensor<8x4xui8>) -> tensor<8x4xf32>
        return %0 : tensor<8x4xf32>
    } }";
    let imported = import(text, "step.mlir", &ImportOptions::default()).unwrap();
    assert!(imported.notes.iter().any(|note| note.contains("narrow")), "{:?}", imported.notes);
    let bytes = text.replace(
        "%0 = stablehlo.convert %x",
        "%c = stablehlo.constant dense<\"0x0102\"> : tensor<2xui8>
        %0 = stablehlo.convert %x",
    );
    assert!(import(&bytes, "step.mlir", &ImportOptions::default()).unwrap_err().reason.contains("argument"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// A damaged text gives an error or a valid graph: the importer verifies the graph that it builds.
    #[test]
    fn damaged_texts_never_break_the_reader(
        case in prop::sample::select(vec!["mlp_sgd", "shapes", "rows", "elements", "indexing", "conv_nchw", "scan_rnn"]),
        changes in prop::collection::vec((any::<usize>(), any::<usize>(), any::<u8>()), 1..4),
    ) {
        let text = damaged(&unpack(&format!("{case}.mlir.gz")), &changes);
        let options = ImportOptions { opaque: vec!["*".into()], ..ImportOptions::default() };
        if let Err(error) = import(&text, "damaged", &options) {
            prop_assert!(error.line >= 1 && error.column >= 1 && !error.reason.is_empty());
        }
        if let Ok(generic) = normalise(&text, "damaged") {
            prop_assert_eq!(normalise(&generic, "again"), Ok(generic));
        }
    }
}

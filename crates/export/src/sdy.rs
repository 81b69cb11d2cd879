//! A plan as a program in Shardy's dialect, for any engine that reads StableHLO.

use crate::shardings::{Shardings, SiteSpecs, Spec};
use shardwright_machine::Mesh;
use shardwright_stablehlo::{Annotations, SiteAnnotation, StablehloError, annotate};

/// Writes a program with the mesh, the shardings of its arguments and results, and a constraint on every planned value.
///
/// # Errors
/// Where the text is no program; it is the one that was imported.
pub fn to_sdy(text: &str, file: &str, shardings: &Shardings, mesh: &Mesh) -> Result<String, StablehloError> {
    let axes: Vec<String> =
        mesh.axes().iter().map(|axis| format!("\"{}\"={}", axis.name, axis.size)).collect();
    let stops = |chain: &Option<Vec<Spec>>| chain.iter().flatten().map(sharding).collect();
    let site = |site: &SiteSpecs| {
        let all = |chains: &[Option<Vec<Spec>>]| chains.iter().map(stops).collect();
        (site.at, SiteAnnotation { operands: all(&site.operands), results: all(&site.results) })
    };
    let known = Annotations {
        mesh: format!("[{}]", axes.join(", ")),
        devices: mesh.devices(),
        arguments: shardings.arguments.iter().map(sharding).collect(),
        results: shardings.results.iter().map(sharding).collect(),
        sites: shardings.sites.iter().map(site).collect(),
    };
    annotate(text, file, &known)
}

fn sharding(spec: &Spec) -> String {
    let dim = |axes: &Option<Vec<String>>| match axes {
        Some(axes) => {
            format!("{{{}}}", axes.iter().map(|axis| format!("\"{axis}\"")).collect::<Vec<_>>().join(", "))
        }
        None => "{?}".into(),
    };
    format!("[{}]", spec.0.iter().map(dim).collect::<Vec<_>>().join(", "))
}

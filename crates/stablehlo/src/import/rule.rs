//! The rule of a call as users write it: `b q h _, b k h _ -> b q h _`.
//!
//! One letter or word per dimension, tensors separated by commas. Dimensions of the same name are shared, and the call works on
//! each block of them separately. `_` is a dimension that the call needs or makes whole, and `()` a scalar.

/// The shared dimension of each dimension, per operand and then per result. A dimension that some result
/// lacks, or that no operand has, stays whole.
///
/// # Errors
/// If the text is no rule.
pub(super) fn parse(text: &str) -> Result<Vec<Vec<Option<u8>>>, String> {
    let (operands, results) = text.split_once("->").ok_or("has no `->` between operands and results")?;
    let tensors = |side: &str| -> Vec<Vec<String>> {
        if side.trim().is_empty() {
            return Vec::new();
        }
        let dims = |tensor: &str| {
            tensor.split_whitespace().filter(|&name| name != "()").map(str::to_string).collect()
        };
        side.split(',').map(dims).collect()
    };
    let (operands, results) = (tensors(operands), tensors(results));
    if results.is_empty() {
        return Err("has no results".into());
    }
    // A block of a dimension that only results have cannot be computed from blocks of operands.
    let read = |name: &String| operands.is_empty() || operands.iter().any(|dims| dims.contains(name));
    let everywhere =
        |name: &String| name != "_" && read(name) && results.iter().all(|dims| dims.contains(name));
    let mut names: Vec<&String> = Vec::new();
    for name in results.iter().flatten().filter(|name| everywhere(name)) {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    if names.len() > usize::from(u8::MAX) {
        return Err("has too many dimensions".into());
    }
    let index = |name: &String| names.iter().position(|known| *known == name).map(|i| i as u8);
    Ok(operands.iter().chain(&results).map(|dims| dims.iter().map(index).collect()).collect())
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn dimensions_of_the_same_name_are_shared_where_every_result_has_them() {
        assert_eq!(
            parse("b q h _, b k h _ -> b q h _").unwrap(),
            [
                vec![Some(0), Some(1), Some(2), None],
                vec![Some(0), None, Some(2), None],
                vec![Some(0), Some(1), Some(2), None]
            ]
        );
        assert_eq!(parse("-> n").unwrap(), [vec![Some(0)]]);
        assert_eq!(parse("n d -> n e").unwrap(), [[Some(0), None], [Some(0), None]]);
        assert_eq!(parse("n, -> n, n m").unwrap()[3], [Some(0), None]);
        assert_eq!(parse("() -> _").unwrap(), [vec![], vec![None]]);
        assert_eq!(parse("n -> ()").unwrap(), [vec![None], vec![]]);
        assert!(parse("b q").is_err());
        assert!(parse("b ->").is_err());
    }
}

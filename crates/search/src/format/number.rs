//! Whole numbers in all of JSON's notations.

/// Why a number is not a 64-bit integer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BadNumber {
    Malformed,
    Fraction,
    Huge,
}

/// Numbers longer than this are refused as malformed, so that one always fits the buffer.
pub(super) const LONGEST_NUMBER: usize = 64;

/// The whole number at the start of `text`, and its length. Fractions and exponents are accepted if the value is whole
/// (`1e3`, `5.0`).
pub(super) fn parse_integer(text: &[u8]) -> Result<(i64, usize), BadNumber> {
    let digits_from = |from: usize| text[from..].iter().take_while(|byte| byte.is_ascii_digit()).count();
    let negative = text.first() == Some(&b'-');
    let start = usize::from(negative);
    let whole = digits_from(start);
    if whole == 0 || (whole > 1 && text[start] == b'0') {
        return Err(BadNumber::Malformed);
    }
    let mut at = start + whole;
    let mut digits: Vec<u8> = text[start..at].to_vec();
    let mut exponent: i64 = 0;
    if text.get(at) == Some(&b'.') {
        let fraction = digits_from(at + 1);
        if fraction == 0 {
            return Err(BadNumber::Malformed);
        }
        digits.extend_from_slice(&text[at + 1..at + 1 + fraction]);
        exponent -= fraction as i64;
        at += 1 + fraction;
    }
    if matches!(text.get(at), Some(b'e' | b'E')) {
        let sign = matches!(text.get(at + 1), Some(b'-' | b'+'));
        let from = at + 1 + usize::from(sign);
        let count = if from <= text.len() { digits_from(from) } else { 0 };
        if count == 0 {
            return Err(BadNumber::Malformed);
        }
        let value = text[from..from + count]
            .iter()
            .fold(0i64, |sum, byte| (sum * 10 + i64::from(byte - b'0')).min(1 << 20));
        exponent += if text[at + 1] == b'-' { -value } else { value };
        at = from + count;
    }
    if at > LONGEST_NUMBER {
        return Err(BadNumber::Huge);
    }
    // Letters directly after the number, as in `1nan` or `0x10`.
    if text.get(at).is_some_and(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'+' | b'-')) {
        return Err(BadNumber::Malformed);
    }
    while exponent < 0 && digits.last() == Some(&b'0') {
        digits.pop();
        exponent += 1;
    }
    let zero = digits.iter().all(|&digit| digit == b'0');
    if zero {
        return Ok((0, at));
    }
    if exponent < 0 {
        return Err(BadNumber::Fraction);
    }
    let mut value: i64 = 0;
    let zeros = std::iter::repeat_n(&b'0', exponent as usize);
    for digit in digits.iter().chain(zeros) {
        let digit = i64::from(digit - b'0');
        value = value
            .checked_mul(10)
            .and_then(|tens| if negative { tens.checked_sub(digit) } else { tens.checked_add(digit) })
            .ok_or(BadNumber::Huge)?;
    }
    Ok((value, at))
}

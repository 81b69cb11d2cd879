//! A page's file: its style, its data and the program that draws them, in one.

use crate::page::Page;
use serde::Serialize;
use std::io::{self, Write};

/// Made by `scripts/build-report`.
const PROGRAM: &str = include_str!("../page/report.js");
const STYLE: &str = include_str!("../page/report.css");

impl Page<'_> {
    /// Writes the page as one HTML file.
    pub fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        let two = if self.difference.is_some() { ": two plans" } else { "" };
        let title = format!("{} on {}{two}", self.plan.model, self.plan.machine);
        write_page(out, &title, &self.plan.summary, self)
    }
}

/// Writes data with the program that draws them; which page it is the program sees from the data. The answer in words comes before the
/// data: it is painted while they are read, which takes a second of a large pipeline.
pub(crate) fn write_page(
    out: &mut dyn Write,
    title: &str,
    answer: &str,
    data: &impl Serialize,
) -> io::Result<()> {
    let (title, answer) = (escaped(title), escaped(answer));
    write!(
        out,
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; \
         script-src 'unsafe-inline'; img-src data:\">\n\
         <title>{title} - Shardwright</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n\
         <noscript>This report is drawn by a program inside it: allow scripts to see it.</noscript>\n\
         <main id=\"first\"><h1>{title}</h1>\n<p class=\"sentence\">{answer}</p></main>\n\
         <script type=\"application/json\" id=\"data\">"
    )?;
    serde_json::to_writer(Harmless(&mut *out), data)?;
    write!(out, "</script>\n<script>\n{PROGRAM}</script>\n</body>\n</html>\n")
}

/// Text as HTML shows it.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// Writes JSON so that nothing in it can end the script element that it is in: `<` only occurs inside of strings,
/// where it may be written as an escape.
struct Harmless<'w>(&'w mut dyn Write);

impl Write for Harmless<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        for (at, part) in bytes.split(|&byte| byte == b'<').enumerate() {
            if at > 0 {
                self.0.write_all(b"\\u003c")?;
            }
            self.0.write_all(part)?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_answer_is_there_before_the_data() {
        let mut out = Vec::new();
        write_page(&mut out, "a <b>", "within 5% & <i>", &[1, 2]).unwrap();
        let page = String::from_utf8(out).unwrap();
        let answer = page.find("<p class=\"sentence\">within 5% &amp; &lt;i&gt;</p>").unwrap();
        assert!(page.find("<h1>a &lt;b&gt;</h1>").unwrap() < answer && answer < page.find("[1,2]").unwrap());
    }

    #[test]
    fn nothing_ends_the_script_element() {
        let text = "</script><script>alert(1)</script><!-- & é";
        let mut out = Vec::new();
        serde_json::to_writer(Harmless(&mut out), text).unwrap();
        assert!(!out.contains(&b'<'));
        assert_eq!(serde_json::from_slice::<String>(&out).unwrap(), text);
        assert_eq!(escaped("<a>&"), "&lt;a&gt;&amp;");
    }
}

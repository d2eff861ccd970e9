//! Rust text as words and signs.

/// Words and single signs, without comments and without what is quoted.
pub(super) fn tokens(text: &str) -> Vec<String> {
    let (mut rest, mut tokens) = (text, Vec::new());
    while let Some(first) = rest.chars().next() {
        let length = not_code(rest).unwrap_or_else(|| {
            let word = rest.find(|c: char| !is_word(c)).unwrap_or(rest.len());
            let length = if word > 0 { word } else { first.len_utf8() };
            if !first.is_whitespace() {
                tokens.push(rest[..length].to_owned());
            }
            length
        });
        rest = &rest[length..];
    }
    tokens
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// The length of the comment, string or character at the start (and of the mark of a raw name).
fn not_code(text: &str) -> Option<usize> {
    if text.starts_with("//") {
        return Some(text.find('\n').unwrap_or(text.len()));
    }
    if text.starts_with("/*") {
        return Some(block_comment(text));
    }
    let prefix = ["br", "cr", "b", "c", "r", ""].into_iter().find(|prefix| {
        let quoted = text.strip_prefix(prefix);
        quoted.is_some_and(|quoted| {
            quoted.starts_with(['"', '\'']) || prefix.ends_with('r') && quoted.starts_with('#')
        })
    })?;
    let quoted = &text[prefix.len()..];
    let length = match quoted.as_bytes()[0] {
        b'\'' if prefix.is_empty() || prefix == "b" => character(quoted)?,
        b'\'' => return None,
        _ if prefix.ends_with('r') => raw_string(quoted),
        _ => closing(quoted, '"'),
    };
    Some(prefix.len() + length)
}

fn block_comment(text: &str) -> usize {
    let (mut at, mut depth) = (0, 0);
    while at < text.len() {
        let pair = &text.as_bytes()[at..text.len().min(at + 2)];
        match pair {
            b"/*" => depth += 1,
            b"*/" => depth -= 1,
            _ => {
                at += 1;
                continue;
            }
        }
        at += 2;
        if depth == 0 {
            break;
        }
    }
    at
}

/// `'a'` or `'\n'`, but not the lifetime `'a`.
fn character(text: &str) -> Option<usize> {
    let mut inside = text[1..].chars();
    let first = inside.next()?;
    if first == '\\' {
        return Some(closing(text, '\''));
    }
    (inside.next() == Some('\'')).then_some(first.len_utf8() + 2)
}

/// `#"…"#`; for the raw name `r#fourth` only its `#`.
fn raw_string(text: &str) -> usize {
    let hashes = text.bytes().take_while(|byte| *byte == b'#').count();
    let Some(body) = text[hashes..].strip_prefix('"') else {
        return hashes;
    };
    let end = format!("\"{}", "#".repeat(hashes));
    body.find(&end)
        .map_or(text.len(), |at| hashes + 1 + at + end.len())
}

/// Up to the quote that closes the one at the start.
fn closing(text: &str, quote: char) -> usize {
    let mut escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            c if c == quote => return at + 1,
            _ => {}
        }
    }
    text.len()
}

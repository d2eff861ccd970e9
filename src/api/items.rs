//! Items that were answered before the call, beside those that it answers.

/// Parts readable items from answered ones. [`merge`] puts the answers together in the order of the items.
pub(super) fn split<T, A>(items: Vec<Result<T, A>>) -> (Vec<T>, Vec<Option<A>>) {
    let mut readable = Vec::with_capacity(items.len());
    let mut note = |item| match item {
        Ok(item) => {
            readable.push(item);
            None
        }
        Err(answer) => Some(answer),
    };
    let known = items.into_iter().map(&mut note).collect();
    (readable, known)
}

pub(super) fn merge<A>(known: Vec<Option<A>>, answers: Vec<A>) -> Vec<A> {
    let mut answers = answers.into_iter();
    known.into_iter().filter_map(|known| known.or_else(|| answers.next())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_come_in_the_order_of_the_items() {
        let (readable, known) = split(vec![Ok("a"), Err(2), Ok("c"), Err(4)]);
        assert_eq!(readable, ["a", "c"]);
        assert_eq!(merge(known, vec![1, 3]), [1, 2, 3, 4]);
    }
}

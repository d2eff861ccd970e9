use serde_json::json;

use super::*;

#[test]
fn expression_sees_its_input_and_its_variables() {
    let expression = Expression::compile(".a + $context", &["context"]).expect("it compiles");
    let result = expression.evaluate(&json!({"a": 1}), &[&json!(2)], Bounds::default());
    assert_eq!(result, Ok(json!(3)));
}

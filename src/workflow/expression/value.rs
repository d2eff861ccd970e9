//! The values that expressions work on. Each reports its memory to the meter and knows how deep it
//! nests, so that nothing here recurses further than [`DEPTH`].

mod delete;
mod interpreter;
mod operators;
mod parse;
mod print;

use std::borrow::Borrow;
use std::cmp::Ordering;
use std::hash::{Hash, Hasher};
use std::rc::Rc;

use indexmap::IndexMap;
use serde_json::Value as Json;

use super::meter::{self, Charge};
use super::number::Number;

pub(super) use operators::split;
pub(super) use parse::parse;

/// How deep arrays and objects may nest. `serde_json` reads 127, so others can wrap a result.
pub(super) const DEPTH: u8 = 100;

/// Work per element that is visited.
const ELEMENT: usize = 16;
/// Memory of an array, object or string without its content.
const NODE: usize = 64;
/// Memory of a property without the text of its name.
const PROPERTY: usize = size_of::<Text>() + size_of::<Val>() + 32;

pub(super) type ValR = jaq_core::ValR<Val>;
pub(super) type Failure = jaq_core::Error<Val>;
pub(super) type Map = IndexMap<Text, Val>;

#[derive(Clone, Debug, Default)]
pub(super) enum Val {
    #[default]
    Null,
    Bool(bool),
    Num(Number),
    Str(Text),
    Arr(Rc<Node<Vec<Val>>>),
    Obj(Rc<Node<Map>>),
}

/// An array or object. A clone pays before it copies, since fields are cloned in order.
#[derive(Clone, Debug)]
pub(super) struct Node<T> {
    charge: Charge,
    /// How deep it nests, or more: it is not lowered when a deep child is replaced.
    depth: u8,
    pub(super) value: T,
}

/// A shared string.
#[derive(Clone, Debug)]
pub(super) struct Text(Rc<Node<String>>);

impl Text {
    pub(super) fn new(text: impl Into<String>) -> Text {
        let value: String = text.into();
        Text(Rc::new(Node {
            charge: Charge::new(NODE + value.len()),
            depth: 0,
            value,
        }))
    }

    pub(super) fn as_str(&self) -> &str {
        &self.0.value
    }

    /// Appends in place if nobody else holds the string.
    pub(super) fn append(mut self, more: &str) -> Text {
        if let Some(node) = Rc::get_mut(&mut self.0) {
            node.charge.add(more.len());
            node.value.push_str(more);
            return self;
        }
        let charge = Charge::new(NODE + self.as_str().len() + more.len());
        let mut value = String::with_capacity(self.as_str().len() + more.len());
        value.push_str(self.as_str());
        value.push_str(more);
        Text(Rc::new(Node {
            charge,
            depth: 0,
            value,
        }))
    }

    /// Counts a comparison or another pass over the text.
    fn visit(&self) {
        meter::work(ELEMENT + self.as_str().len() / 8);
    }
}

impl Borrow<str> for Text {
    fn borrow(&self) -> &str {
        self.as_str()
    }
}

impl PartialEq for Text {
    fn eq(&self, other: &Text) -> bool {
        self.as_str() == other.as_str()
    }
}

impl Eq for Text {}

impl PartialOrd for Text {
    fn partial_cmp(&self, other: &Text) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Text {
    fn cmp(&self, other: &Text) -> Ordering {
        self.visit();
        self.as_str().cmp(other.as_str())
    }
}

impl Hash for Text {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.visit();
        self.as_str().hash(state);
    }
}

impl Node<Vec<Val>> {
    fn push(&mut self, value: Val) {
        self.charge.add(size_of::<Val>());
        self.hold(&value);
        self.value.push(value);
    }

    fn take(self) -> Vec<Val> {
        self.value
    }
}

impl Node<Map> {
    /// Sets a property.
    fn insert(&mut self, name: Text, value: Val) {
        self.hold(&value);
        if let Some(slot) = self.value.get_mut(&name) {
            *slot = value;
            return;
        }
        self.charge.add(PROPERTY);
        self.value.insert(name, value);
    }
}

impl<T: Default> Node<T> {
    fn empty() -> Node<T> {
        Node {
            charge: Charge::new(NODE),
            depth: 1,
            value: T::default(),
        }
    }
}

impl<T> Node<T> {
    /// Notes how deep the child nests that it is going to hold.
    fn hold(&mut self, child: &Val) {
        if child.depth() >= DEPTH {
            meter::too_deep();
        }
        self.depth = self.depth.max(child.depth() + 1);
    }
}

impl Val {
    pub(super) fn text(text: impl Into<String>) -> Val {
        Val::Str(Text::new(text))
    }

    pub(super) fn int(value: usize) -> Val {
        Val::Num(Number::Int(value as i128))
    }

    pub(super) fn array(values: impl IntoIterator<Item = Val>) -> Val {
        let mut array = Node::<Vec<Val>>::empty();
        for value in values {
            array.push(value);
        }
        Val::Arr(Rc::new(array))
    }

    pub(super) fn object(properties: impl IntoIterator<Item = (Text, Val)>) -> Val {
        let mut object = Node::<Map>::empty();
        for (name, value) in properties {
            object.insert(name, value);
        }
        Val::Obj(Rc::new(object))
    }

    pub(super) fn from_json(json: &Json) -> Val {
        match json {
            Json::Null => Val::Null,
            Json::Bool(value) => Val::Bool(*value),
            Json::Number(number) => Val::Num(Number::from_json(number)),
            Json::String(text) => Val::text(text.as_str()),
            Json::Array(values) => Val::array(values.iter().map(Val::from_json)),
            Json::Object(properties) => Val::object(
                properties
                    .iter()
                    .map(|(name, value)| (Text::new(name.as_str()), Val::from_json(value))),
            ),
        }
    }

    /// Returns the value as JSON, or none if that has more than `left` bytes, by a rough count.
    pub(super) fn to_json(&self, left: &mut usize) -> Option<Json> {
        meter::work(ELEMENT);
        let bytes = match self {
            Val::Null | Val::Bool(_) => 4,
            Val::Num(_) => 8,
            Val::Str(text) => text.as_str().len() + 2,
            Val::Arr(array) => array.value.len() + 2,
            Val::Obj(object) => {
                let names = object.value.keys();
                names.map(|name| name.as_str().len() + 4).sum::<usize>() + 2
            }
        };
        *left = left.checked_sub(bytes)?;
        Some(match self {
            Val::Null => Json::Null,
            Val::Bool(value) => Json::Bool(*value),
            Val::Num(number) => number.to_json().map_or(Json::Null, Json::Number),
            Val::Str(text) => Json::String(text.as_str().to_owned()),
            Val::Arr(array) => {
                let values = array.value.iter().map(|value| value.to_json(left));
                Json::Array(values.collect::<Option<_>>()?)
            }
            Val::Obj(object) => {
                let properties = object.value.iter();
                let properties = properties
                    .map(|(name, value)| Some((name.as_str().to_owned(), value.to_json(left)?)));
                Json::Object(properties.collect::<Option<_>>()?)
            }
        })
    }

    pub(super) fn depth(&self) -> u8 {
        match self {
            Val::Arr(array) => array.depth,
            Val::Obj(object) => object.depth,
            _ => 0,
        }
    }

    pub(super) fn type_name(&self) -> &'static str {
        match self {
            Val::Null => "null",
            Val::Bool(_) => "boolean",
            Val::Num(_) => "number",
            Val::Str(_) => "string",
            Val::Arr(_) => "array",
            Val::Obj(_) => "object",
        }
    }

    pub(super) fn is_true(&self) -> bool {
        !matches!(self, Val::Null | Val::Bool(false))
    }

    pub(super) fn as_text(&self) -> Result<&str, Failure> {
        match self {
            Val::Str(text) => {
                text.visit();
                Ok(text.as_str())
            }
            other => Err(Failure::typ(other.clone(), "string")),
        }
    }

    pub(super) fn as_number(&self) -> Result<Number, Failure> {
        match self {
            Val::Num(number) => Ok(*number),
            other => Err(Failure::typ(other.clone(), "number")),
        }
    }

    pub(super) fn as_array(&self) -> Result<&[Val], Failure> {
        match self {
            Val::Arr(array) => {
                meter::work(ELEMENT * array.value.len());
                Ok(&array.value)
            }
            other => Err(Failure::typ(other.clone(), "array")),
        }
    }

    pub(super) fn as_object(&self) -> Result<&Map, Failure> {
        match self {
            Val::Obj(object) => {
                meter::work(ELEMENT * object.value.len());
                Ok(&object.value)
            }
            other => Err(Failure::typ(other.clone(), "object")),
        }
    }

    /// Returns the elements, without a copy if nobody else holds the array.
    pub(super) fn into_elements(self) -> Result<Vec<Val>, Failure> {
        self.as_array()?;
        match self {
            Val::Arr(array) => Ok(Rc::unwrap_or_clone(array).take()),
            other => Err(Failure::typ(other, "array")),
        }
    }

    /// jq's order of all values: null, false, true, numbers, strings, arrays, objects.
    pub(super) fn order(&self, other: &Val) -> Ordering {
        meter::work(ELEMENT);
        match (self, other) {
            (Val::Bool(left), Val::Bool(right)) => left.cmp(right),
            (Val::Num(left), Val::Num(right)) => left.order(*right),
            (Val::Str(left), Val::Str(right)) => left.cmp(right),
            (Val::Arr(left), Val::Arr(right)) => {
                let pairs = left.value.iter().zip(&right.value);
                pairs
                    .map(|(left, right)| left.order(right))
                    .find(|order| order.is_ne())
                    .unwrap_or_else(|| left.value.len().cmp(&right.value.len()))
            }
            (Val::Obj(left), Val::Obj(right)) => order_objects(&left.value, &right.value),
            _ => self.rank().cmp(&other.rank()),
        }
    }

    fn rank(&self) -> u8 {
        match self {
            Val::Null => 0,
            Val::Bool(_) => 1,
            Val::Num(_) => 2,
            Val::Str(_) => 3,
            Val::Arr(_) => 4,
            Val::Obj(_) => 5,
        }
    }
}

/// Orders objects by their sorted names, then by the values in the order of the names.
fn order_objects(left: &Map, right: &Map) -> Ordering {
    let left_names = sorted_names(left);
    let right_names = sorted_names(right);
    left_names.cmp(&right_names).then_with(|| {
        let pairs = left_names
            .iter()
            .map(|name| left[*name].order(&right[*name]));
        let mut pairs = pairs.filter(|order| order.is_ne());
        pairs.next().unwrap_or(Ordering::Equal)
    })
}

pub(super) fn sorted_names(object: &Map) -> Vec<&Text> {
    meter::work(ELEMENT * object.len());
    let mut names: Vec<_> = object.keys().collect();
    names.sort();
    names
}

impl PartialEq for Val {
    fn eq(&self, other: &Val) -> bool {
        meter::work(ELEMENT);
        match (self, other) {
            (Val::Null, Val::Null) => true,
            (Val::Bool(left), Val::Bool(right)) => left == right,
            (Val::Num(left), Val::Num(right)) => !left.is_nan() && left.order(*right).is_eq(),
            (Val::Str(left), Val::Str(right)) => {
                left.visit();
                left == right
            }
            (Val::Arr(left), Val::Arr(right)) => left.value == right.value,
            (Val::Obj(left), Val::Obj(right)) => {
                left.value.len() == right.value.len()
                    && left
                        .value
                        .iter()
                        .all(|(name, value)| right.value.get(name) == Some(value))
            }
            _ => false,
        }
    }
}

/// As in jq, what is not a number is less than every number, itself included.
impl PartialOrd for Val {
    fn partial_cmp(&self, other: &Val) -> Option<Ordering> {
        if let (Val::Num(left), Val::Num(right)) = (self, other)
            && left.is_nan()
            && right.is_nan()
        {
            return Some(Ordering::Less);
        }
        Some(self.order(other))
    }
}

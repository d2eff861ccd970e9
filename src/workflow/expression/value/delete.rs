//! Removing what paths lead to.

use std::rc::Rc;

use super::{Failure, Node, Val, ValR};
use crate::workflow::expression::meter;
use crate::workflow::expression::value::interpreter::{element, slice_of};

impl Val {
    /// Removes what each path leads to, the last first, so that no removal shifts what another
    /// path means. A path that leads nowhere removes nothing.
    pub(in super::super) fn delete_paths(self, paths: &Val) -> ValR {
        let mut paths = paths.as_array()?.to_vec();
        paths.sort_by(|left, right| right.order(left));
        paths.dedup();
        paths
            .iter()
            .try_fold(self, |value, path| value.delete(path.as_array()?))
    }

    fn delete(self, path: &[Val]) -> ValR {
        meter::work(64);
        let Some((first, rest)) = path.split_first() else {
            return Ok(Val::Null);
        };
        match (self, first) {
            (Val::Null, _) => Ok(Val::Null),
            (Val::Obj(mut object), Val::Str(name)) => {
                if !object.value.contains_key(name) {
                    return Ok(Val::Obj(object));
                }
                let node = Rc::make_mut(&mut object);
                if rest.is_empty() {
                    meter::work(node.value.len());
                    node.value.shift_remove(name);
                } else if let Some(value) = node.value.get_mut(name) {
                    *value = std::mem::replace(value, Val::Null).delete(rest)?;
                }
                Ok(Val::Obj(object))
            }
            (Val::Arr(mut array), Val::Num(index)) => {
                let Some(index) = element(*index, array.value.len()) else {
                    return Ok(Val::Arr(array));
                };
                let node: &mut Node<Vec<Val>> = Rc::make_mut(&mut array);
                if rest.is_empty() {
                    meter::work(node.value.len());
                    node.value.remove(index);
                } else {
                    let value = &mut node.value[index];
                    *value = std::mem::replace(value, Val::Null).delete(rest)?;
                }
                Ok(Val::Arr(array))
            }
            (Val::Arr(mut array), Val::Obj(range)) => {
                let (from, to) = slice_of(&range.value, array.value.len())?;
                let node: &mut Node<Vec<Val>> = Rc::make_mut(&mut array);
                meter::work(node.value.len());
                if rest.is_empty() {
                    node.value.drain(from..to);
                } else {
                    let part = Val::array(node.value[from..to].iter().cloned());
                    let kept = part.delete(rest)?.into_elements()?;
                    node.value.splice(from..to, kept);
                }
                Ok(Val::Arr(array))
            }
            (value, name) => Err(Failure::index(value, name.clone())),
        }
    }
}

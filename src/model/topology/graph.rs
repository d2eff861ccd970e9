//! A topology as a drawing.

use std::fmt::Write as _;

use super::{Edge, OUT, Stage, Topology};

impl Topology {
    /// The graph in the language of Graphviz.
    pub fn to_dot(&self) -> String {
        let mut text = format!("digraph {:?} {{\n  rankdir = LR;\n", self.name.as_str());
        for stage in &self.stages {
            let shape = match (stage.is_start, stage.join) {
                (true, _) => "doubleoctagon",
                (false, Some(_)) => "invtrapezium",
                (false, None) => "box",
            };
            push(
                &mut text,
                format_args!("  {:?} [shape = {shape}];\n", stage.name),
            );
        }
        for (from, edge) in self.edges() {
            let to = &self.stages[edge.to].name;
            let label = edge.label();
            let style = if edge.goes_back {
                ", style = dashed"
            } else {
                ""
            };
            let edge = format_args!("  {:?} -> {to:?} [label = {label:?}{style}];\n", from.name);
            push(&mut text, edge);
        }
        text.push_str("}\n");
        text
    }

    /// The graph as Mermaid draws it, for example in a README.
    pub fn to_mermaid(&self) -> String {
        let mut text = "flowchart LR\n".to_owned();
        for (number, stage) in self.stages.iter().enumerate() {
            let name = &stage.name;
            let node = match (stage.is_start, stage.join) {
                (true, _) => format!("  s{number}([\"{name}\"])\n"),
                (false, Some(_)) => format!("  s{number}[\\\"{name}\"/]\n"),
                (false, None) => format!("  s{number}[\"{name}\"]\n"),
            };
            text.push_str(&node);
        }
        for (number, stage) in self.stages.iter().enumerate() {
            for edge in &stage.edges {
                let arrow = if edge.goes_back { "-.->" } else { "-->" };
                // Quotes would end the label.
                let label = edge.label().replace('"', "'");
                let label = match label.as_str() {
                    "" => String::new(),
                    label => format!("|\"{label}\"|"),
                };
                push(
                    &mut text,
                    format_args!("  s{number} {arrow}{label} s{}\n", edge.to),
                );
            }
        }
        text
    }

    fn edges(&self) -> impl Iterator<Item = (&Stage, &Edge)> {
        let of_stage = |stage| std::iter::repeat(stage);
        self.stages
            .iter()
            .flat_map(move |stage| of_stage(stage).zip(&stage.edges))
    }
}

impl Edge {
    /// The port and the condition, as far as there are any.
    fn label(&self) -> String {
        let port = match self.port.as_str() {
            OUT => "",
            port => port,
        };
        match (port, self.matching.names().next()) {
            (port, None) => port.to_owned(),
            ("", Some(_)) => self.matching.to_json().to_string(),
            (port, Some(_)) => format!("{port} {}", self.matching.to_json()),
        }
    }
}

fn push(text: &mut String, line: std::fmt::Arguments<'_>) {
    text.write_fmt(line).expect("a String takes everything");
}

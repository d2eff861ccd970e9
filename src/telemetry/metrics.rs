//! Every metric: its name, unit and labels. Names are `taskd_<subject>_<what>_<unit>[_total]`.

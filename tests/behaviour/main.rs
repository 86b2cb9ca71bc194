//! The promises of a loader without faults: order, ranks, resume, states, memory, stopping,
//! exports.

#[path = "../common/mod.rs"]
mod common;

mod budget;
mod chunks;
mod dlpack;
mod export;
mod extend;
mod frontier;
mod groups;
mod lists;
mod loader;
mod packed;
mod processes;
mod ragged;
mod ranks;
mod resume;
mod skips;
mod state;
mod stop;
mod uniformity;

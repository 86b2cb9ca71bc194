//! The machine between two moments: its cores, quota and devices, as this process sees them.

use crate::observation::Machine;
use feedline_report::meter::{Cpu, device_bytes};
use std::time::Instant;

/// Counters at a moment.
pub struct Moment {
    at: Instant,
    cpu: Cpu,
    device_bytes: u64,
}

impl Moment {
    pub fn now() -> Self {
        Self {
            at: Instant::now(),
            cpu: Cpu::now(),
            device_bytes: device_bytes().unwrap_or(0),
        }
    }

    /// Adds what happened until `end`.
    pub fn add_until(&self, end: &Self, machine: &mut Machine) {
        let process_ns = end.cpu.process_ns.saturating_sub(self.cpu.process_ns);
        machine.cores = cores();
        machine.watched_ns += end.at.duration_since(self.at).as_nanos() as u64;
        machine.process_ns += process_ns;
        let others = end.cpu.others_ns.zip(self.cpu.others_ns);
        let busy = others.map(|(end, begin)| process_ns + end.saturating_sub(begin));
        machine.busy_ns = match (machine.busy_ns, busy) {
            (Some(sum), Some(busy)) => Some(sum + busy),
            (sum, busy) => sum.or(busy),
        };
        machine.device_bytes += end.device_bytes.saturating_sub(self.device_bytes);
        machine.quota = end.cpu.quota;
        machine.throttled_ns += end.cpu.throttled_ns.saturating_sub(self.cpu.throttled_ns);
    }
}

/// The cores that this process may use.
pub fn cores() -> u32 {
    rustix::thread::sched_getaffinity(None).map_or(1, |cores| cores.count())
}

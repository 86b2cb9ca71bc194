//! Contexts: a loader makes none on a GPU that is not its own, for each would take hundreds of
//! megabytes there.

use crate::driver::is_active;
use crate::ours::{data, device, records, words};
use crate::pull::RECORD;
use crate::section::Ctx;
use feedline::device::Gds;
use feedline::{Device, Loader};

pub fn run(ctx: &Ctx) -> Result<(), String> {
    let count = feedline::unstable::devices()
        .map_err(|absent| absent.to_string())?
        .1
        .len() as i32;
    let others = || (1..count).map(|gpu| is_active(gpu).map(|active| (gpu, active)));
    if count < 2 {
        ctx.skip("the other GPUs have no context", "there is one GPU only");
        return Ok(());
    }
    // A context of somebody else in this process, such as a profiler's, is none of ours.
    let before = others().collect::<Result<Vec<_>, _>>()?;
    let same = |what: &str| {
        ctx.check(
            format!("the other GPUs have no context of ours: {what}"),
            || {
                let after = others().collect::<Result<Vec<_>, _>>()?;
                let words = format!("{} other GPUs, active {after:?}", count - 1);
                if after == before {
                    Ok(words)
                } else {
                    Err(format!("before {before:?}, {words}"))
                }
            },
        );
    };
    same("the devices are listed");
    let auto = Device::auto();
    same("the device is chosen");
    drop(auto);
    let path = data(ctx)?;
    for gds in [Gds::Off, Gds::Auto] {
        let builder = Loader::builder(records(&path, RECORD)?)
            .batch_size(4)
            .device(device()?)
            .tuning(|t| t.gds(gds));
        let loader = builder.build().map_err(words)?;
        for batch in loader.epoch(0).map_err(words)?.take(8) {
            let batch = batch.map_err(words)?;
            let field = batch.field("record").map_err(words)?;
            field
                .read_into(&mut vec![0; field.size_bytes()])
                .map_err(words)?;
        }
        same(&format!("a loader runs, {gds:?}"));
        drop(loader);
        same(&format!("it is dropped, {gds:?}"));
    }
    Ok(())
}

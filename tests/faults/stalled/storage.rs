use super::*;
use crate::common::toys::Chunks;
use feedline::storage::{Direct, Mode};
use feedline::unstable::{Fault, Faulty};
use std::sync::Arc;

/// Checks that the error blames storage and names the place.
fn assert_placed(error: &Error, what: &dyn std::fmt::Debug) {
    let site = error.site();
    assert_eq!(error.stage(), Stage::Read, "{error}, {what:?}");
    assert!(
        site.path.is_some() && site.offset.is_some(),
        "{error}, {what:?}"
    );
}

/// Records in a file, read by plain calls.
fn plain(dir: &Dir) -> LoaderBuilder {
    let (path, _) = records_file(dir, 40, 64);
    let builder = Loader::builder(records(&path, 64))
        .batch_size(40)
        .tuning(|t| t.slots(2))
        .workers(1)
        .order(Order::sequential());
    builder.on_bad_sample(ALL).tuning(|t| {
        t.reader(Mode::Pread)
            .direct(Direct::Off)
            .stall_deadline(DEADLINE)
    })
}

#[test]
fn a_retry_that_hangs_is_named_with_its_place() {
    let faulty = Arc::new(
        Faulty::new()
            .times(1, 1, Fault::Error(5))
            .ever(2, Fault::Late(ms(2500))),
    );
    let dir = Dir::new();
    let loader = build(plain(&dir).tuning(|t| t.faulty(faulty.clone())));
    assert_placed(&stall(&loader), &faulty.hits());
}

#[test]
fn a_read_of_a_substitute_that_wedges_is_named_with_its_place() {
    let dir = Dir::new();
    let faulty = Arc::new(Faulty::new());
    let inject = faulty.clone();
    let loader = build(
        plain(&dir)
            .tuning(|t| t.faulty(faulty.clone()))
            .map(move |_, ctx| match ctx.id() {
                39 => {
                    inject.inject(1000, Fault::Late(ms(2500)));
                    Err(Error::user("bad"))
                }
                _ => Ok(()),
            }),
    );
    assert_placed(&stall(&loader), &faulty.hits());
}

#[test]
fn a_page_cache_read_that_hangs_is_named_with_its_place() {
    let dir = Dir::new();
    let faulty = Arc::new(Faulty::new().ever(0, Fault::Late(ms(2500))));
    let loader = build(plain(&dir).tuning(|t| t.reader(Mode::Auto).faulty(faulty.clone())));
    assert_placed(&stall(&loader), &faulty.hits());
}

#[test]
fn a_chunk_retry_that_hangs_is_named_with_its_place() {
    let dir = Dir::new();
    let faulty = Arc::new(
        Faulty::new()
            .times(1, 1, Fault::Error(5))
            .ever(2, Fault::Late(ms(3000))),
    );
    let dataset = Chunks::open(&dir.write("chunk", &[7; 400]), &[100], 4);
    let builder = Loader::builder(dataset)
        .batch_size(4)
        .tuning(|t| t.stall_deadline(ms(300)));
    let loader = build(builder.tuning(|t| {
        t.reader(Mode::Pread)
            .direct(Direct::Off)
            .faulty(faulty.clone())
    }));
    assert_placed(&stall(&loader), &faulty.hits());
}

use super::*;
use crate::common::formats::tar_member;
use feedline::dataset::Tar;
use feedline::tensor::{DType, Field};
use feedline::{ErrorKind, Loader, LoaderBuilder, Order};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::path::Path;
use std::time::Duration;

#[test]
fn an_error_over_the_budget_is_one_line() {
    let builder = Loader::builder(bytes(20))
        .batch_size(20)
        .on_bad_sample(OnBadSample::Substitute { budget: 0 });
    let loader = build(builder.map(|_, ctx| match ctx.id() {
        4 => Err(Error::user("a\nsample 9: all is well")),
        _ => Ok(()),
    }));
    let error = loader.epoch(0).unwrap().next().unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::BadSamples);
    assert!(
        !error.to_string().contains('\n') && error.to_string().contains("sample 4"),
        "{error}"
    );
}

/// Names come from untrusted files.
#[test]
fn an_entry_is_one_line_whatever_the_name_of_a_member() {
    let dir = Dir::new();
    let name = |id| {
        if id == 4 {
            "4\nsample 9: all is well.bin".into()
        } else {
            format!("{id}.bin")
        }
    };
    let mut tar: Vec<u8> = (0..20)
        .flat_map(|id| tar_member(&name(id), &[b'x'; 8]))
        .collect();
    tar.extend([0; 1024]);
    let builder = Tar::builder()
        .index(false)
        .raw(Field::fixed("bin", DType::U8, [8]), "bin");
    let dataset = builder.open(dir.write("a.tar", &tar)).unwrap();
    let builder = Loader::builder(dataset)
        .batch_size(20)
        .order(Order::sequential());
    let loader = build(builder.on_bad_sample(ALL).map(refuse(&[4])));
    assert_eq!(pulled(loader.epoch(0).unwrap()), 20);
    let words = loader.ledger().samples[0].to_string();
    assert!(
        words.contains("all is well") && !words.contains('\n'),
        "{words}"
    );
}

/// Rows that were not delivered are not in the ledger.
#[test]
fn the_ledger_counts_no_rows_of_the_batch_over_the_budget() {
    let dir = Dir::new();
    let path = dir.path("ledger");
    let builder = Loader::builder(bytes(20))
        .batch_size(10)
        .order(Order::sequential())
        .ledger(&path);
    let loader = build(
        builder
            .on_bad_sample(OnBadSample::Substitute { budget: 1 })
            .map(refuse(&[2, 12, 13])),
    );
    let delivered: u64 = loader
        .epoch(0)
        .unwrap()
        .map_while(Result::ok)
        .map(|batch| batch.status().iter().filter(|status| **status == 2).count() as u64)
        .sum();
    assert_eq!((delivered, loader.ledger().substituted), (1, 1));
    assert_eq!(std::fs::read_to_string(path).unwrap().lines().count(), 1);
}

fn with_ledger(path: &Path) -> LoaderBuilder {
    Loader::builder(bytes(20))
        .batch_size(4)
        .on_bad_sample(ALL)
        .map(refuse(&[5]))
        .ledger(path)
}

#[test]
fn a_ledger_where_a_folder_or_a_fifo_is_is_refused() {
    let dir = Dir::new();
    let fifo = dir.path("fifo");
    crate::hostile::fifo(&fifo);
    for path in [dir.path(""), fifo, "/dev/full".into()] {
        assert!(with_ledger(&path).build().is_err(), "{}", path.display());
    }
}

#[test]
fn two_loaders_may_write_one_ledger_while_others_look_at_it() {
    let dir = Dir::new();
    let path = dir.path("shared");
    let two: Vec<_> = (0..2).map(|_| build(with_ledger(&path))).collect();
    std::thread::scope(|scope| {
        for loader in &two {
            scope.spawn(move || {
                loader
                    .epochs(0..50)
                    .unwrap()
                    .for_each(|batch| drop(batch.unwrap()))
            });
            scope.spawn(move || (0..200).for_each(|_| assert!(loader.ledger().samples.len() < 2)));
        }
    });
    let text = std::fs::read_to_string(&path).unwrap();
    assert_eq!(
        text.lines()
            .filter(|line| line.starts_with('{') && line.ends_with('}'))
            .count(),
        100
    );
}

/// Only the cut line is lost: once there is free space, the next entry begins on its own line.
#[test]
fn a_line_that_a_full_disk_cut_does_not_spoil_the_next() {
    if let Some(dir) = in_child() {
        return write_with_and_without_room(&dir.join("ledger"));
    }
    let dir = Dir::new();
    // A limit of the process imitates the full disk. Its signal, 25, would end the process.
    run(child(&here!(), &dir.path(""), "trap '' 25; ulimit -S -f 1"));
    let text = std::fs::read_to_string(dir.path("ledger")).unwrap();
    let wrong: Vec<_> = text
        .lines()
        .filter(|line| serde_json::from_str::<serde_json::Value>(line).is_err())
        .collect();
    assert!(
        wrong
            .iter()
            .all(|line| line.matches("{\"epoch").count() < 2),
        "{wrong:?}"
    );
}

fn write_with_and_without_room(path: &Path) {
    let builder = Loader::builder(bytes(20)).batch_size(20).on_bad_sample(ALL);
    let loader = build(builder.ledger(path).map(refuse(&[5])));
    for epoch in 0..30 {
        if epoch == 20 {
            let most = getrlimit(Resource::Fsize).maximum;
            setrlimit(
                Resource::Fsize,
                Rlimit {
                    current: most,
                    maximum: most,
                },
            )
            .unwrap();
        }
        assert_eq!(pulled(loader.epoch(epoch).unwrap()), 20);
    }
    assert!(loader.ledger().not_written.is_some());
}

/// The budget bounds the records of bad samples, also before the batch is complete.
#[test]
fn memory_stays_near_the_plan_with_only_bad_samples() {
    // In a separate process: memory of other tests would count, too.
    if !alone(&here!()) {
        return;
    }
    let resident = || {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status
            .lines()
            .find(|line| line.starts_with("VmRSS"))
            .unwrap()
            .to_string();
        line.split_whitespace()
            .nth(1)
            .unwrap()
            .parse::<usize>()
            .unwrap()
            << 10
    };
    let builder = Loader::builder(bytes(60_000))
        .batch_size(20_000)
        .tuning(|t| t.slots(2))
        .workers(2);
    let loader = build(
        builder
            .on_bad_sample(OnBadSample::Substitute { budget: 0 })
            .map(|_, _| Err(Error::user("bad"))),
    );
    let planned = loader.plan().total();
    let before = resident();
    let mut epoch = loader.epoch(0).unwrap();
    let mut most = 0;
    while epoch.next_within(Duration::from_millis(1)).is_pending() {
        most = most.max(resident());
    }
    let grew = most.max(resident()).saturating_sub(before);
    assert!(
        grew < planned + (16 << 20),
        "planned {planned} bytes, the process grew by {grew}"
    );
}

use super::datasets::{Hungry, Pictures, numbered};
use super::*;
use feedline::error::Stage;
use feedline::order::LastBatch;
use feedline::tensor::{DType, Field};
use feedline::unstable::{Fault, Faulty};
use feedline::{ErrorKind, Loader, LoaderBuilder, Order};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

#[test]
fn substituted_rows_are_whole_with_the_least_memory() {
    let dir = Dir::new();
    let (path, bytes) = records_file(&dir, 300, 4096);
    let make = || {
        let builder = Loader::builder(records(&path, 4096))
            .batch_size(10)
            .tuning(|t| t.slots(2))
            .workers(1)
            .on_bad_sample(ALL);
        builder.map_adding([Field::fixed("n", DType::I64, [])], |row, ctx| {
            let n = row.index_of("n")?;
            row.slice_mut::<i64>(n)?[0] = ctx.id() as i64;
            if ctx.id() % 7 == 0 {
                Err(Error::user("7"))
            } else {
                Ok(())
            }
        })
    };
    let plan = make().build().unwrap().plan().total();
    let least = (1..)
        .map(|part| plan / 64 * part)
        .find(|bytes| make().memory_budget(*bytes).build().is_ok())
        .unwrap();
    let seen = make().map_batch(|batch, _| {
        let ids = batch.ids().to_vec();
        let n = batch.index_of("n")?;
        assert!(
            batch
                .slice_mut::<i64>(n)?
                .iter()
                .zip(ids)
                .all(|(n, id)| *n == id as i64)
        );
        Ok(())
    });
    for builder in [make().memory_budget(least), make().keep(["n"]), seen] {
        let loader = build(builder);
        for batch in loader.epoch(1).unwrap() {
            let batch = batch.unwrap();
            let numbers = batch.field("n").unwrap().as_slice::<i64>().unwrap();
            assert!(
                numbers
                    .iter()
                    .zip(batch.ids())
                    .all(|(n, id)| *n == *id as i64 && id % 7 != 0)
            );
            if batch.fields().count() == 2 {
                assert!(
                    rows(&batch)
                        .iter()
                        .all(|(id, row)| *row == bytes[*id as usize * 4096..][..4096])
                );
            }
        }
        assert_eq!(loader.ledger().samples.len(), 43);
        for taken in 0..20 {
            let mut epoch = loader.epoch(taken).unwrap();
            epoch
                .next_within(Duration::from_micros(taken * 100))
                .is_ready();
        }
    }
}

#[test]
fn a_substitute_sees_nothing_of_a_half_written_row() {
    let dir = Dir::new();
    let bytes = noise(400 * 64, 9);
    let path = dir.write("r.bin", &bytes);
    let mut first: Option<BTreeMap<(u64, usize), (u64, u64)>> = None;
    for (workers, (mode, direct)) in [1, 4, 6].into_iter().zip([reader(4), reader(0), reader(2)]) {
        let added = Field::fixed("sum", DType::I64, []);
        let builder = Loader::builder(records(&path, 64))
            .batch_size(16)
            .order(Order::shuffled(1))
            .workers(workers);
        let builder = builder
            .tuning(|t| t.reader(mode).direct(direct))
            .on_bad_sample(ALL)
            .map_adding([added], |row, ctx| {
                let sum = row.index_of("sum")?;
                row.bytes_mut(0)[..8].reverse();
                let id = ctx.id();
                let (a, b) = rayon::join(|| id, || 7);
                assert_eq!(a - id + b, 7);
                row.bytes_mut(0)[..8].reverse();
                if row.slice_mut::<i64>(sum)?[0] != 0 {
                    return Err(Error::new(ErrorKind::Config, Stage::Map, "left over"));
                }
                row.slice_mut::<i64>(sum)?[0] = ctx.id() as i64 + 1;
                if ctx.id() % 4 == 2 {
                    panic!("after the sum")
                }
                if ctx.id() % 2 == 0 {
                    Err(Error::user("even"))
                } else {
                    Ok(())
                }
            });
        let loader = build(builder);
        let mut got = BTreeMap::new();
        for batch in loader.epochs(0..2).unwrap() {
            let batch = batch.unwrap();
            for (row, (id, data)) in rows(&batch).into_iter().enumerate() {
                assert!(id % 2 == 1 && data == bytes[id as usize * 64..][..64]);
                assert_eq!(
                    batch.fields().nth(1).unwrap().as_slice::<i64>().unwrap()[row],
                    id as i64 + 1
                );
                got.insert(
                    (batch.epoch() * 1000 + batch.index(), row),
                    (id, u64::from(batch.status()[row])),
                );
            }
        }
        assert_eq!(*first.get_or_insert(got.clone()), got);
    }
}

#[test]
fn padding_of_the_last_batch_stays_beside_a_substitute() {
    for last in [LastBatch::Pad, LastBatch::Mask] {
        let builder = Loader::builder(bytes(9)).batch_size(4).last_batch(last);
        let loader = build(builder.on_bad_sample(ALL).map(refuse(&[8])));
        let status: Vec<u8> = loader
            .epoch(0)
            .unwrap()
            .flat_map(|batch| batch.unwrap().status().to_vec())
            .collect();
        assert_eq!(status, [0, 0, 0, 0, 0, 0, 0, 0, 2, 1, 1, 1], "{last:?}");
    }
}

/// The choice of samples does not depend on the available memory: a picture too large for the rest
/// of the budget is the epoch's error.
#[test]
fn no_sample_is_substituted_because_the_memory_budget_is_tight() {
    for (budget, end) in [
        (256 << 20, None),
        (80 << 20, Some(ErrorKind::Limit)),
        (32 << 20, Some(ErrorKind::Limit)),
    ] {
        let builder = Loader::builder(Pictures::new())
            .batch_size(10)
            .workers(2)
            .tuning(|t| t.slots(2))
            .decode(Hungry);
        let loader = build(builder.on_bad_sample(ALL).memory_budget(budget));
        let done = loader
            .epoch(0)
            .unwrap()
            .try_for_each(|batch| batch.map(drop));
        assert_eq!(done.err().map(|error| error.kind()), end, "{budget}");
        assert_eq!(loader.ledger().substituted, 0, "{budget}");
    }
}

/// A shared stream of random numbers.
#[derive(Clone)]
struct Chance(Arc<AtomicU64>);

impl Chance {
    fn below(&self, below: u64) -> u64 {
        let word = self.0.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed);
        let word = (word ^ (word >> 31)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (word ^ (word >> 29)) % below
    }

    /// Random settings, faults and a transform.
    fn set(&self, builder: LoaderBuilder, life: u64) -> LoaderBuilder {
        let faulty = (0..20).fold(Faulty::new(), |faulty, _| {
            faulty.once(self.below(600), Fault::Error(5))
        });
        let order = if self.below(2) == 0 {
            Order::sequential()
        } else {
            Order::shuffled(life)
        };
        let (mode, direct) = reader(self.below(6) as usize);
        let builder = builder
            .order(order)
            .tuning(|t| t.reader(mode).direct(direct).faulty(Arc::new(faulty)))
            .on_bad_sample(ALL);
        let builder = builder
            .batch_size(1 + self.below(30) as usize)
            .tuning(|t| t.slots(1 + self.below(4) as usize));
        let inside = self.clone();
        builder
            .workers(1 + self.below(5) as usize)
            .tuning(|t| t.stall_deadline(Duration::from_secs(60)))
            .map(move |_, _| match inside.below(40) {
                0 => panic!("by chance"),
                1 | 2 => Err(Error::user("by chance")),
                3 => {
                    rayon::join(std::thread::yield_now, std::thread::yield_now);
                    Ok(())
                }
                _ => Ok(()),
            })
    }
}

/// Everything at once, 150 lives: transforms that fail, panic or pass at random, rayon inside,
/// occasional EIO, drops anywhere.
#[test]
fn random_faults_lose_double_or_reorder_nothing() {
    let dir = Dir::new();
    let (path, bytes) = records_file(&dir, 500, 64);
    let chance = Chance(Arc::new(AtomicU64::new(88_172_645_463_325_252)));
    for life in 0..150_u64 {
        let toy = numbered(
            &dir,
            &[7, 0, 40, 1, 90, 2],
            if life % 3 == 0 { &[0] } else { &[] },
        );
        let chunked = life % 2 == 0;
        let builder = if chunked {
            Loader::builder(toy)
        } else {
            Loader::builder(records(&path, 64))
        };
        let loader = build(chance.set(builder, life));
        let right = |id: u64| {
            if chunked {
                id.to_ne_bytes().to_vec()
            } else {
                bytes[id as usize * 64..][..64].to_vec()
            }
        };
        let mut substituted = 0;
        for epoch in 0..3 {
            let planned = loader.preview(epoch, 1000).unwrap();
            let stop = chance.below(60) as usize;
            let mut at = 0;
            for batch in loader.epoch(epoch).unwrap().take(stop) {
                let batch = batch.unwrap();
                for ((id, row), status) in rows(&batch).into_iter().zip(batch.status()) {
                    assert!(
                        row == right(id) && (*status == 2 || id == planned[at]),
                        "life {life}, row {at}"
                    );
                    substituted += u64::from(*status == 2);
                    at += 1;
                }
            }
        }
        let ledger = loader.ledger();
        let times: u64 = ledger.samples.iter().map(|bad| bad.times).sum();
        assert_eq!((ledger.substituted, times), (substituted, substituted));
    }
}

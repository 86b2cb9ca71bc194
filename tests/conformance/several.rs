//! Several datasets as one: no sample is lost, doubled or misplaced, and mixes have the promised
//! shares.

use crate::common::numeric::{Row, cases, check, fixture, load, one};
use crate::common::sweep;
use crate::common::{Dir, assert_says, must_fail, must_say, noise};
use feedline::dataset::{
    ChunkBuf, ChunkBytes, Chunked, Concat, Dataset, DatasetExt, Mix, Npy, Parts, Records, Sizes,
    Tokens,
};
use feedline::order::{Draws, Order};
use feedline::storage::{Extent, SourceId, Sources};
use feedline::tensor::{DType, EncodedField, Field};
use feedline::{ErrorKind, Loader, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

type Any = Arc<dyn Dataset>;

/// Three kinds of datasets with the field `x` of six bytes: files, memory, a folder of arrays.
fn parts(dir: &Dir) -> (Vec<Any>, Vec<Row>) {
    let first = noise(6 * 7, 1);
    dir.write("records/a.bin", &first[..18]);
    dir.write("records/b.bin", &first[18..]);
    let second = noise(6 * 3, 2);
    let array = |bytes: &[u8]| {
        let dict = "{'descr': '|u1', 'fortran_order': False, 'shape': (6,), }\n";
        [
            b"\x93NUMPY\x01\x00",
            &(dict.len() as u16).to_le_bytes()[..],
            dict.as_bytes(),
            bytes,
        ]
        .concat()
    };
    let third = noise(6 * 4, 3);
    for (index, bytes) in third.chunks(6).enumerate() {
        dir.write(&format!("npy/{index}.npy"), &array(bytes));
    }
    let records = Records::builder(6).field("x", DType::U8, [6]);
    let datasets: Vec<Any> = vec![
        Arc::new(records.clone().open(dir.path("records")).unwrap()),
        Arc::new(records.open_bytes(second.clone()).unwrap()),
        Arc::new(Npy::builder().field("x", dir.path("npy")).open().unwrap()),
    ];
    let rows = [first, second, third]
        .concat()
        .chunks(6)
        .map(|bytes| one("x", bytes))
        .collect();
    (datasets, rows)
}

#[test]
fn datasets_of_different_kinds_follow_each_other() {
    let dir = Dir::new();
    let (datasets, rows) = parts(&dir);
    check(|| Concat::new(datasets.clone()), &rows);
    let concat = Concat::new(datasets).unwrap();
    assert_eq!((concat.len(), concat.parts()), (14, 3));
    assert_eq!(
        [0, 6, 7, 9, 10, 13].map(|id| concat.origin(id)),
        [(0, 0), (0, 6), (1, 0), (1, 2), (2, 0), (2, 3)]
    );
    assert_eq!(
        (concat.ids_of(1), concat.sources().count()),
        (7..10, 2 + 1 + 4)
    );
    assert!(
        concat
            .describe()
            .starts_with("14 samples of 3 parts: 7 records"),
        "{concat:?}"
    );
}

#[test]
fn concatenations_nest_and_empty_parts_take_no_ids() {
    let dir = Dir::new();
    let (datasets, rows) = parts(&dir);
    let (none, all) = Records::builder(6)
        .field("x", DType::U8, [6])
        .open_bytes([9; 6])
        .unwrap()
        .split(0.0, 1)
        .unwrap();
    assert_eq!((none.len(), all.len()), (0, 1));
    check(
        || {
            let inner: Any = Arc::new(Concat::new(datasets[..2].to_vec())?);
            Concat::new([
                inner,
                Arc::new(none.clone()) as Any,
                datasets[2].clone(),
                Arc::new(all.clone()) as Any,
            ])
        },
        &[rows, vec![one("x", &[9; 6])]].concat(),
    );
}

#[test]
fn incompatible_parts_are_named() {
    let records = |bytes: usize, name: &str| {
        Arc::new(
            Records::builder(bytes)
                .field(name, DType::U8, [bytes])
                .open_bytes(vec![0; bytes])
                .unwrap(),
        ) as Any
    };
    let error = Concat::new([records(6, "x"), records(6, "y")]).unwrap_err();
    assert!(
        error.to_string().contains("part 1 (1 records")
            && error.to_string().contains("fields are y, not x")
    );
    must_say(
        Concat::new([records(6, "x"), records(5, "x")]),
        "its field `x` is u8 [5], not u8 [6]",
    );
    assert_eq!(
        Concat::new(Vec::<Any>::new()).unwrap_err().kind(),
        ErrorKind::Config
    );
    must_say(
        Concat::new([records(6, "x"), Arc::new(Chunks::new(2)) as Any]),
        "has chunks, the other has none",
    );
    // As many samples as its chunks have, in another order.
    let turned = Chunks::new(2).subset([3, 2, 1, 0]).unwrap();
    must_say(
        Concat::new([Arc::new(Chunks::new(2)) as Any, Arc::new(turned) as Any]),
        "the chunks of part 1 do not end with its last sample",
    );
}

#[test]
fn an_error_of_a_part_names_its_own_file() {
    let dir = Dir::new();
    let (datasets, _) = parts(&dir);
    let concat = Concat::new(datasets).unwrap();
    dir.write("npy/2.npy", b"another length");
    let error = load(concat).unwrap_err();
    assert_eq!(
        (error.kind(), error.site().sample),
        (ErrorKind::Changed, Some(12))
    );
    assert_says(&error, "npy/2.npy");
}

/// Chunks of two samples, each 6 bytes of a memory source of its own.
struct Chunks {
    sources: Arc<Sources>,
    schema: Vec<EncodedField>,
    starts: Vec<u64>,
}

impl Chunks {
    fn new(count: u64) -> Self {
        let mut sources = Sources::new();
        for chunk in 0..count {
            sources.memory(vec![chunk as u8; 12].into());
        }
        let schema = vec![EncodedField::raw(Field::fixed("x", DType::U8, [6]))];
        Self {
            sources: Arc::new(sources),
            schema,
            starts: (0..=count).map(|chunk| chunk * 2).collect(),
        }
    }
}

impl Dataset for Chunks {
    fn schema(&self) -> &[EncodedField] {
        &self.schema
    }
    fn len(&self) -> u64 {
        self.starts[self.starts.len() - 1]
    }
    fn sources(&self) -> &Arc<Sources> {
        &self.sources
    }
    fn sizes(&self) -> Sizes {
        Sizes::new(6)
    }
    fn extents<'a>(&'a self, _: u64, _: &mut Parts<'a>) -> Result<()> {
        unreachable!("samples come in chunks")
    }
    fn chunked(&self) -> Option<&dyn Chunked> {
        Some(self)
    }
}

impl Chunked for Chunks {
    fn starts(&self) -> &[u64] {
        &self.starts
    }
    fn chunk_extents(&self, chunk: usize, extents: &mut Vec<Extent>) -> Result<()> {
        extents.push(Extent {
            source: SourceId::at(chunk),
            offset: 0,
            len: 12,
        });
        Ok(())
    }
    fn chunk_bytes(&self, chunk: usize) -> ChunkBytes {
        ChunkBytes {
            encoded: 12,
            opened: 12,
            scratch: chunk as u64,
        }
    }
    fn open_chunk(
        &self,
        chunk: usize,
        pieces: &[bytes::Bytes],
        _: &mut feedline::decode::Scratch,
        out: &mut ChunkBuf,
    ) -> Result<()> {
        assert!(pieces[0].iter().all(|byte| *byte == chunk as u8));
        out.fixed(0, 6)?.copy_from_slice(&pieces[0]);
        Ok(())
    }
    fn chunk_name(&self, chunk: usize) -> String {
        format!("chunk {chunk}")
    }
}

#[test]
fn chunks_of_the_second_part_follow_those_of_the_first() {
    let concat = Concat::new([Chunks::new(2), Chunks::new(3)]).unwrap();
    let chunked = concat.chunked().unwrap();
    assert_eq!(chunked.starts(), [0, 2, 4, 6, 8, 10]);
    for (chunk, source, local) in [(0, 0, 0), (1, 1, 1), (2, 2, 0), (4, 4, 2)] {
        let mut extents = vec![Extent {
            source: SourceId::at(9),
            offset: 0,
            len: 1,
        }];
        chunked.chunk_extents(chunk, &mut extents).unwrap();
        assert_eq!(extents[0].source, SourceId::at(9), "what was there stays");
        assert_eq!(extents[1].source, SourceId::at(source));
        assert_eq!(chunked.chunk_bytes(chunk).scratch, local);
        assert_eq!(chunked.chunk_name(chunk), format!("chunk {local}"));
        let piece = concat
            .sources()
            .bytes_of(extents[1].source)
            .unwrap()
            .to_vec();
        let mut out = ChunkBuf::new(4096).unwrap();
        out.begin(2, 1);
        chunked
            .open_chunk(
                chunk,
                &[piece.into()],
                &mut feedline::decode::Scratch::default(),
                &mut out,
            )
            .unwrap();
    }
}

#[test]
fn datasets_in_chunks_are_mixed_with_all_chunks_open() {
    let segments = [(0, vec![1.0, 1.0]), (8, vec![1.0, 3.0])];
    let mix = Mix::scheduled([Chunks::new(2), Chunks::new(30)], segments, 1)
        .unwrap()
        .epoch_len(20)
        .unwrap();
    let loader = Loader::builder(mix.clone())
        .batch_size(4)
        .workers(2)
        .build()
        .unwrap();
    let mut drawn = Vec::new();
    for batch in loader.epochs(0..3).unwrap() {
        let batch = batch.unwrap();
        let rows = batch
            .field("x")
            .unwrap()
            .as_slice::<u8>()
            .unwrap()
            .chunks(6);
        for (id, row) in batch.ids().iter().zip(rows) {
            assert_eq!(
                row,
                [(mix.concat().origin(*id).1 / 2) as u8; 6],
                "two samples of a chunk"
            );
            drawn.push(*id);
        }
    }
    let right: Vec<u64> = (0..60)
        .map(|position| mix.sampler().unwrap().id(position / 20, position % 20))
        .collect();
    assert_eq!(drawn, right);
    let delivered = loader
        .snapshot()
        .consumer
        .sources
        .iter()
        .map(|source| source.delivered)
        .collect::<Vec<_>>();
    assert_eq!(delivered, [4 + 13, 4 + 39]);
    let error = Loader::builder(mix.clone())
        .memory_budget(4096)
        .build()
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Budget, "{error}");
}

#[cfg(all(feature = "parquet", feature = "zstd"))]
mod chunked {
    use super::*;
    use crate::common::runs::row_bytes;
    use crate::common::workloads::WORKLOADS;
    use feedline::memory::MemoryTerm;
    use feedline::{Batch, Rank};

    #[test]
    fn parquet_and_zstd_shards_are_mixed_within_the_planned_memory() {
        for name in ["parquet", "mds, zstd"] {
            let workload = WORKLOADS
                .iter()
                .find(|workload| workload.name == name)
                .unwrap();
            let dir = Dir::new();
            let open = || (workload.open)(&dir);
            let plain = Loader::builder(open()).batch_size(7).build().unwrap();
            let rows: Vec<Vec<u8>> = all(&plain, 0).into_iter().map(|(_, bytes)| bytes).collect();
            let segments = [(0, vec![1.0, 1.0]), (50, vec![1.0, 4.0])];
            let mix = Mix::scheduled([open(), open()], segments, 9)
                .unwrap()
                .epoch_len(100)
                .unwrap();
            let make = |rank| Loader::builder(mix.clone()).global_batch(7).rank(rank);
            for world in [1, 3] {
                let mut found = Vec::new();
                for rank in (0..world).map(|number| Rank::new(number, world).unwrap()) {
                    let loader = make(rank).workers(2).build().unwrap();
                    let chunks = loader.plan().term(MemoryTerm::CHUNKS);
                    assert_eq!(
                        chunks.count,
                        mix.chunked().unwrap().starts().len() - 1,
                        "{name}: all are open"
                    );
                    found.extend((0..3).flat_map(|epoch| all(&loader, epoch)));
                }
                for (id, bytes) in &found {
                    assert_eq!(
                        bytes,
                        &rows[mix.concat().origin(*id).1 as usize],
                        "{name}: sample {id}"
                    );
                }
                let mut found: Vec<u64> = found.iter().map(|(id, _)| *id).collect();
                let mut right: Vec<u64> = (0..300)
                    .map(|place| mix.sampler().unwrap().id(place / 100, place % 100))
                    .collect();
                found.sort_unstable();
                right.sort_unstable();
                assert_eq!(found, right, "{name}, {world} ranks");
            }
            let error = make(Rank::single())
                .memory_budget(10_000)
                .build()
                .unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Budget, "{error}");
            let words =
                "at once: a mix or sampler may need any chunk at any time and has no window";
            assert_says(&error, words);
        }
    }

    /// Ids and bytes of the samples of an epoch.
    fn all(loader: &Loader, epoch: u64) -> Vec<(u64, Vec<u8>)> {
        let rows = |batch: Batch| {
            let rows = (0..batch.len()).filter(|row| batch.status()[*row] == 0);
            rows.map(|row| (batch.ids()[row], row_bytes(&batch, row)))
                .collect::<Vec<_>>()
        };
        loader
            .epoch(epoch)
            .unwrap()
            .flat_map(|batch| rows(batch.unwrap()))
            .collect()
    }
}

/// Datasets of these numbers of bytes; each byte is a sample.
fn bytes(lens: &[usize]) -> Vec<Records> {
    lens.iter()
        .enumerate()
        .map(|(part, len)| {
            Records::builder(1)
                .open_bytes(
                    (0..*len)
                        .map(|at| (part * 50 + at) as u8)
                        .collect::<Vec<_>>(),
                )
                .unwrap()
        })
        .collect()
}

fn mix(sources: &[(usize, f64)], key: u64) -> Result<Mix> {
    let (lens, weights): (Vec<usize>, Vec<f64>) = sources.iter().copied().unzip();
    Mix::new(bytes(&lens).into_iter().zip(weights), key)
}

#[test]
fn a_mix_delivers_its_shares_exactly_by_block() {
    let mix = mix(&[(30, 0.7), (4, 0.3)], 5)
        .unwrap()
        .epoch_len(500)
        .unwrap();
    assert_eq!(mix.block(), [7, 3]);
    let loader = Loader::builder(mix.clone())
        .batch_size(10)
        .workers(3)
        .build()
        .unwrap();
    let mut drawn = [Vec::new(), Vec::new()];
    for batch in loader.epochs(0..3).unwrap() {
        let batch = batch.unwrap();
        let values = batch.field("record").unwrap().as_slice::<u8>().unwrap();
        let mut counts = [0; 2];
        for (id, value) in batch.ids().iter().zip(values) {
            let (part, local) = mix.concat().origin(*id);
            assert_eq!(u64::from(*value), part as u64 * 50 + local);
            counts[part] += 1;
            drawn[part].push(local);
        }
        assert_eq!(counts, [7, 3], "a batch of one block");
    }
    for (drawn, len) in drawn.iter().zip([30, 4]) {
        let passes: Vec<Vec<u64>> = drawn.chunks(len).map(<[u64]>::to_vec).collect();
        for pass in passes.iter().filter(|pass| pass.len() == len) {
            let mut sorted = pass.clone();
            sorted.sort_unstable();
            assert_eq!(
                sorted,
                (0..len as u64).collect::<Vec<_>>(),
                "every sample once a pass"
            );
        }
        assert!(
            passes.windows(2).any(|pair| pair[0] != pair[1]),
            "passes are shuffled anew"
        );
    }
}

#[test]
fn a_mix_depends_on_its_key_alone() {
    let of = |key| mix(&[(2000, 1.0), (3, 1.0), (50, 2.5)], key).unwrap();
    let mixed = of(1);
    let ids: Vec<u64> = (0..2000)
        .map(|position| mixed.sampler().unwrap().id(2, position))
        .collect();
    assert_ne!(
        ids,
        (0..2000)
            .map(|position| of(2).sampler().unwrap().id(2, position))
            .collect::<Vec<_>>()
    );
    let again = of(1);
    std::thread::scope(|scope| {
        for thread in 0..4_u64 {
            let again = &again;
            let ids = &ids;
            scope.spawn(move || {
                for step in 0..sweep::size(300, 2000, 2000) {
                    let position = (step * 7919 + thread * 13) % 2000;
                    assert_eq!(
                        again.sampler().unwrap().id(2, position),
                        ids[position as usize]
                    );
                }
            });
        }
    });
    assert_eq!(mixed.sampler().unwrap().len(), 2053);
    // An order of the epoch's positions: epoch 1 continues where epoch 0 ended.
    let short = of(1).epoch_len(100).unwrap();
    assert_eq!(
        short.sampler().unwrap().id(20, 0),
        mixed.sampler().unwrap().id(0, 2000)
    );
}

#[test]
fn epochs_last_until_the_first_source_ends_or_all_are_seen() {
    let of = || mix(&[(30, 3.0), (40, 1.0)], 5).unwrap();
    let seen = |mix: &Mix| {
        let mut times = BTreeMap::new();
        (0..mix.sampler().unwrap().len()).for_each(|position| {
            *times
                .entry(mix.sampler().unwrap().id(0, position))
                .or_insert(0) += 1
        });
        times
    };
    let first = of().until_first_ends();
    assert_eq!(first.sampler().unwrap().len(), 40);
    assert!(seen(&first).values().all(|times| *times == 1));
    let all = of().until_all_seen();
    assert_eq!(all.sampler().unwrap().len(), 160);
    assert_eq!(seen(&all).len(), 70);
    assert_eq!(
        mix(&[(1, 0.9), (1, 0.1)], 5)
            .map(|mix| mix.until_first_ends().sampler().unwrap().len())
            .unwrap(),
        10
    );
}

/// What was drawn of a source, by a naive walk.
#[derive(Default)]
struct Walked {
    drawn: u64,
    pass: BTreeSet<u64>,
}

/// Walks `positions` of a mix by its ids alone, from what was `walked`: every sample once in each
/// pass of its source.
fn walk(mix: &Mix, positions: std::ops::Range<u64>, walked: &mut Vec<Walked>) -> Vec<u64> {
    let len = mix.sampler().unwrap().len();
    walked.resize_with(mix.concat().parts(), Walked::default);
    positions
        .map(|position| {
            let id = mix.sampler().unwrap().id(position / len, position % len);
            let (source, local) = mix.concat().origin(id);
            let (source, samples) = (&mut walked[source], mix.concat().ids_of(source));
            assert!(
                source.pass.insert(local),
                "sample {local} of {samples:?} again in a pass, at position {position}"
            );
            source.drawn += 1;
            if source.pass.len() as u64 == samples.end - samples.start {
                source.pass.clear();
            }
            id
        })
        .collect()
}

#[test]
fn each_segment_has_exact_shares_and_passes_go_on() {
    let mut draws = Draws::new(3, 0, 0, "schedules");
    for _ in 0..sweep::size(60, 300, 2000) {
        let sources = 1 + draws.below(5) as usize;
        let lens: Vec<usize> = (0..sources).map(|_| 1 + draws.below(50) as usize).collect();
        let mut weights = || {
            let mut weights: Vec<f64> = (0..sources).map(|_| draws.below(12) as f64).collect();
            weights[0] += 1.0;
            weights
        };
        let tables: Vec<Vec<f64>> = (0..4).map(|_| weights()).collect();
        let lengths: Vec<u64> = (0..4).map(|_| 1 + draws.below(300)).collect();
        let starts: Vec<u64> = (0..4)
            .map(|segment| lengths[..segment].iter().sum())
            .collect();
        let segments = starts.iter().copied().zip(tables.clone());
        let mix = Mix::scheduled(bytes(&lens), segments, draws.next_u64()).unwrap();
        let mix = mix.epoch_len(1 + draws.below(200)).unwrap();
        let mut walked = Vec::new();
        for ((start, len), table) in starts.iter().zip(lengths).zip(tables) {
            let before: Vec<u64> = walked
                .iter()
                .map(|source: &Walked| source.drawn)
                .chain(vec![0; sources])
                .collect();
            walk(&mix, *start..start + len, &mut walked);
            let sum: f64 = table.iter().sum();
            for (source, weight) in table.iter().enumerate() {
                let got = (walked[source].drawn - before[source]) as f64;
                let share = len as f64 * weight / sum;
                assert!((got - share).abs() < 1.0 + 1e-6, "{got} of {share}");
            }
            let place = start + len;
            let progress = mix
                .sampler()
                .unwrap()
                .progress(
                    place / mix.sampler().unwrap().len(),
                    place % mix.sampler().unwrap().len(),
                )
                .unwrap();
            let delivered: Vec<u64> = progress.sources.iter().map(|source| source.drawn).collect();
            assert_eq!(
                delivered,
                walked.iter().map(|source| source.drawn).collect::<Vec<_>>()
            );
        }
    }
}

#[test]
fn another_future_and_more_sources_leave_the_past_alone() {
    let old = || (0, vec![0.5, 0.5]);
    let of = |lens: &[usize], rest: Vec<(u64, Vec<f64>)>| {
        let segments = [old()].into_iter().chain(rest);
        Mix::scheduled(bytes(lens), segments, 7)
            .unwrap()
            .epoch_len(1000)
            .unwrap()
    };
    let before = of(&[40, 30], vec![]);
    // From any position on; 37 is in the middle of a block of 10.
    for at in [1, 37, 100, 999, 2500] {
        let after = of(&[40, 30, 20, 9], vec![(at, vec![0.3, 0.0, 0.6, 0.1])]);
        let mut walked = Vec::new();
        let past = walk(&after, 0..at, &mut walked);
        assert_eq!(
            past,
            walk(&before, 0..at, &mut Vec::new()),
            "changed at {at}"
        );
        let drawn = walked[1].drawn;
        walk(&after, at..at + 500, &mut walked);
        assert_eq!(
            (walked[1].drawn, walked[2].drawn, walked[3].drawn),
            (drawn, 300, 50)
        );
        assert_eq!(
            before.sampler().unwrap().progress(0, at).unwrap().past,
            after.sampler().unwrap().progress(0, at).unwrap().past
        );
        assert_ne!(
            before.sampler().unwrap().progress(0, at + 1).unwrap().past,
            after.sampler().unwrap().progress(0, at + 1).unwrap().past
        );
        assert_ne!(
            before.sampler().unwrap().identity(),
            after.sampler().unwrap().identity()
        );
    }
}

#[test]
fn no_row_of_a_batch_always_gets_the_same_source() {
    let mix = mix(&[(100, 1.0), (100, 1.0)], 5).unwrap();
    for row in 0..2 {
        let first: usize = (0..1000)
            .filter(|batch| mix.sampler().unwrap().id(0, batch * 2 + row) < 100)
            .count();
        // Binomial: mean 500, sd 15.8.
        assert!(first.abs_diff(500) < 80, "{first}");
    }
}

#[test]
fn a_mix_keeps_its_order_in_wrappers_and_has_no_other() {
    let mixed = || mix(&[(30, 0.7), (4, 0.3)], 5).unwrap();
    let ids = |builder: feedline::LoaderBuilder| {
        let loader = builder.batch_size(8).build().unwrap();
        loader.preview(0, 1000).unwrap()
    };
    let right = ids(Loader::builder(mixed()));
    assert_eq!(right.len(), 34);
    assert_eq!(ids(Loader::builder(mixed().in_memory().unwrap())), right);
    let dir = Dir::new();
    let checked = mixed().facts(dir.path("sums")).checksums().open().unwrap();
    assert_eq!(ids(Loader::builder(Arc::new(checked))), right);

    let ordered = Loader::builder(mixed()).order(Order::shuffled(1)).build();
    for (error, words) in [
        (ordered.map(drop).unwrap_err(), "has an order of its own"),
        (
            mixed().split(0.5, 1).map(drop).unwrap_err(),
            "take parts of its sources",
        ),
        (
            mixed().subset([1]).map(drop).unwrap_err(),
            "take parts of its sources",
        ),
        (
            Concat::new([mixed()]).map(drop).unwrap_err(),
            "concatenate or mix its sources",
        ),
        (
            mixed()
                .packed("record", 4)
                .open(dir.path("bins"))
                .map(drop)
                .unwrap_err(),
            "pack its sources",
        ),
        (
            mixed()
                .copied(["record"], dir.path("copy"))
                .map(drop)
                .unwrap_err(),
            "copy its sources",
        ),
        (
            Mix::new([(mixed(), 1.0)], 3).map(drop).unwrap_err(),
            "concatenate or mix its sources",
        ),
    ] {
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
        assert_says(&error, words);
    }
}

#[test]
fn impossible_mixes_are_refused() {
    for (sources, words) in [
        (&[(5, 0.0), (5, 1.0)][..], "weight 0 of the mix is 0"),
        (&[(5, 1.0), (5, f64::NAN)], "weight 1 of the mix is NaN"),
        (
            &[(5, 1.0), (5, 1e-10)],
            "weight 1 of the mix, 0.0000000001, is under 2^-32",
        ),
        (
            &[(5, 1.0), (5, -0.5)],
            "weight 1 of the mix is -0.5: it must be finite and not negative",
        ),
        (&[], "no datasets"),
    ] {
        must_fail(mix(sources, 1), ErrorKind::Config, words);
    }
    let table = |weights: &[f64]| weights.to_vec();
    for (segments, words) in [
        (vec![], "the schedule of the mix has no segments"),
        (
            vec![(5, table(&[1.0, 1.0]))],
            "the schedule of the mix begins at position 5: begin it with (0, weights)",
        ),
        (
            vec![
                (0, table(&[1.0])),
                (9, table(&[1.0])),
                (9, table(&[1.0, 1.0])),
            ],
            "segment 2 of the mix begins at position 9, the one before at 9: list segments by ascending positions",
        ),
        (
            vec![(0, table(&[1.0])), (9, table(&[1.0]))],
            "segment 1 of the mix has 1 weights for 2 datasets",
        ),
        (
            vec![(0, table(&[1.0, 1.0, 1.0])), (9, table(&[1.0, 1.0]))],
            "segment 0 of the mix has 3 weights for 2 datasets",
        ),
        (
            vec![(0, table(&[0.0, 0.0])), (9, table(&[1.0, 1.0]))],
            "segment 0 of the mix has no weight above 0",
        ),
        (
            vec![(0, table(&[])), (9, table(&[1.0, 1.0]))],
            "segment 0 of the mix has no weight above 0",
        ),
        (
            vec![(0, table(&[1.0, 1.0])), (9, table(&[1.0, f64::NAN]))],
            "weight 1 of segment 1 of the mix is NaN",
        ),
        (
            vec![(0, table(&[1.0, 1.0])), (9, table(&[1.0, 1e-10]))],
            "weight 1 of segment 1 of the mix, 0.0000000001, is under 2^-32",
        ),
        (
            (0..300).map(|start| (start, table(&[1.0, 1.0]))).collect(),
            "300 segments in a mix; the limit is 256",
        ),
    ] {
        must_fail(
            Mix::scheduled(bytes(&[5, 5]), segments, 1),
            ErrorKind::Config,
            words,
        );
    }
    let (none, _) = bytes(&[4]).pop().unwrap().split(0.0, 1).unwrap();
    let some = bytes(&[4]).pop().unwrap().subset([0, 1]).unwrap();
    must_say(
        Mix::new([(none, 1.0), (some, 1.0)], 1),
        "dataset 0 of the mix has no samples",
    );
    assert!(mix(&[(5, 1.0)], 1).unwrap().epoch_len(0).is_err());
}

#[test]
fn the_fixtures_of_two_formats_are_one_dataset() {
    let flat = &cases("tokens", "flat.bin")[0].bytes;
    let rows: Vec<Row> = flat.chunks(20).map(|bytes| one("tokens", bytes)).collect();
    check(
        || {
            let file: Any = Arc::new(
                Tokens::builder(DType::U16)
                    .window(10)
                    .open(fixture("tokens").join("flat.bin"))?,
            );
            let memory: Any = Arc::new(
                Tokens::builder(DType::U16)
                    .window(10)
                    .open_bytes(flat.clone())?,
            );
            Concat::new([memory, file])
        },
        &[rows.clone(), rows].concat(),
    );
}

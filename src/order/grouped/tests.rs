//! Grouped orders against lists: every batch of every rank, by definition. 10,000 random cases,
//! 100,000 with `FEEDLINE_SWEEP=ci`.

use super::super::{Batches, EpochOrder, Order};
use super::*;
use feedline_base::error::{Error, ErrorKind};

const ALL: [LastBatch; 4] = [
    LastBatch::Keep,
    LastBatch::Mask,
    LastBatch::Pad,
    LastBatch::Drop,
];

/// A row of a batch: batch, group, rank, row, sample, whether it is of the epoch.
type Taken = (u64, usize, u64, u64, Option<u64>, bool);

/// The samples of a group.
fn own(of: &[u8], group: usize) -> Vec<u64> {
    let own = (0..).zip(of).filter(|(_, of)| usize::from(**of) == group);
    own.map(|(id, _)| id).collect()
}

/// How a case sizes its batches.
#[derive(Debug)]
enum Rows {
    Each(Vec<u64>),
    /// Tokens, and a multiple of rows.
    Budget(u64, u64),
}

#[derive(Debug)]
struct Case {
    /// The group of each sample.
    of: Vec<u8>,
    /// The greatest length of each group; none where samples fit one group only.
    bounds: Option<Vec<u64>>,
    rows: Rows,
    last: LastBatch,
    shuffled: Option<u64>,
    epoch: u64,
    /// The largest world that the batches allow.
    world_max: u64,
}

impl Case {
    fn draw(number: u64) -> Self {
        let mut draws = Draws::new(number, 0, 0, "groups");
        let groups = 1 + draws.below(5);
        let least = 1 + draws.below(4);
        let rows = Rows::Each((0..groups).map(|_| least + draws.below(6)).collect());
        let of = (0..1 + draws.below(50))
            .map(|_| draws.below(groups) as u8)
            .collect();
        let shuffled = draws.bool(0.7).then(|| draws.next_u64());
        let last = ALL[draws.below(4) as usize];
        let epoch = draws.below(3);
        let bounds = draws.bool(0.7).then(|| {
            let mut bound = 0;
            let next = |_| {
                bound += 1 + draws.below(9);
                bound
            };
            (0..groups).map(next).collect::<Vec<u64>>()
        });
        let longest = bounds.iter().flatten().max().copied();
        let rows = match longest {
            Some(longest) if draws.bool(0.6) => {
                Rows::Budget(longest * least * (1 + draws.below(4)), least)
            }
            _ => rows,
        };
        Self {
            of,
            bounds,
            rows,
            last,
            shuffled,
            epoch,
            world_max: least,
        }
    }

    fn groups(&self) -> Groups {
        let groups = match &self.bounds {
            Some(bounds) => {
                Groups::by(self.of.iter().map(|of| bounds[usize::from(*of)]), bounds).unwrap()
            }
            None => Groups::of(self.of.iter().copied()).unwrap(),
        };
        match &self.rows {
            Rows::Each(rows) => groups.batch_sizes(rows.clone()),
            Rows::Budget(most, multiple) => groups.budget(*most).multiple_of(*multiple),
        }
    }

    /// Rows of a batch of each group.
    fn rows(&self) -> Vec<u64> {
        match (&self.rows, &self.bounds) {
            (Rows::Budget(most, multiple), Some(bounds)) => bounds
                .iter()
                .map(|bound| most / bound / multiple * multiple)
                .collect(),
            (Rows::Each(rows), _) => rows.clone(),
            (Rows::Budget(..), None) => unreachable!("a budget needs lengths"),
        }
    }

    fn order(&self, rank: u64, world: u64) -> (EpochOrder, Batches) {
        let rank = Rank::new(rank as u32, world as u32).unwrap();
        let order = self
            .shuffled
            .map_or_else(Order::sequential, Order::shuffled)
            .grouped(self.groups());
        let len = self.of.len() as u64;
        let order = order.planned(len, 1, self.last, rank).unwrap();
        let epoch = order.epoch(len, self.epoch).unwrap();
        let largest = order.largest_batch().unwrap();
        let batches = Batches::new(epoch.len(), largest, self.last, rank).unwrap();
        let batches = batches.in_groups(epoch.groups());
        (epoch, batches)
    }

    /// The rows that a world of ranks takes from batch `from` on.
    fn taken(&self, world: u64, from: u64) -> Vec<Taken> {
        let mut out = Vec::new();
        for rank in 0..world {
            let (order, whole) = self.order(rank, world);
            let start = whole.first_position(from);
            let batches = whole.starting(start, from);
            for batch in from..batches.end() {
                let group = usize::from(batches.group(batch).unwrap());
                for row in 0..batches.rows(batch) {
                    let filled = row < batches.filled(batch);
                    let id = filled.then(|| order.id(batches.position(batch, row)).unwrap());
                    let is_valid = row < batches.valid(batch);
                    out.push((batch, group, rank, row.into(), id, is_valid));
                }
            }
        }
        out.sort_unstable();
        out
    }

    /// The members of the batches of each group, and the samples before them in the line.
    fn members(
        &self,
        shuffle: &dyn Fn(usize, &str, usize) -> Vec<usize>,
    ) -> Vec<(usize, Vec<u64>, Vec<u64>)> {
        let rows = self.rows();
        let flows = self.bounds.is_some();
        let largest = usize::from(*self.of.iter().max().unwrap());
        let mut line = Vec::new();
        let mut carried = Vec::new();
        let mut all = Vec::new();
        for (group, rows) in rows.iter().enumerate().take(largest + 1) {
            let own = own(&self.of, group);
            if own.is_empty() {
                continue;
            }
            let mixes = !carried.is_empty();
            let places = shuffle(own.len(), "samples", group);
            carried.extend(places.into_iter().map(|k| own[k]));
            let whole = carried.len() - carried.len() % *rows as usize;
            let rest = if flows && group < largest {
                carried.split_off(whole)
            } else {
                Vec::new()
            };
            let members = std::mem::replace(&mut carried, rest);
            let before = if flows { line.clone() } else { Vec::new() };
            line.extend(&members);
            let members = if mixes {
                let places = shuffle(members.len(), "members", group);
                places.into_iter().map(|k| members[k]).collect()
            } else {
                members
            };
            all.push((group, members, before));
        }
        all
    }

    /// The same by definition.
    fn naive(&self, world: u64) -> Vec<Taken> {
        let key = self
            .shuffled
            .map(|seed| Key::new(seed).named("groups").derive(self.epoch));
        let permuted = |n: usize, key: Option<Key>| -> Vec<usize> {
            let Some(key) = key else {
                return (0..n).collect();
            };
            let permutation = Permutation::new(n as u64, key);
            let places = (0..n as u64).map(|k| permutation.get(k) as usize);
            places.collect()
        };
        let of_group = |n: usize, name: &str, group: usize| {
            permuted(n, key.map(|key| key.named(name).derive(group as u64)))
        };
        let flows = self.bounds.is_some();
        let line: Vec<u64> = self.line(&of_group);
        let mut batches = Vec::new();
        let mut short = None;
        for (group, members, before) in self.members(&of_group) {
            let rows = self.rows()[group];
            for part in members.chunks(rows as usize) {
                let real = part.len() as u64;
                let size = match self.last {
                    LastBatch::Mask => rows,
                    LastBatch::Pad if flows => rows,
                    LastBatch::Drop if real < rows => continue,
                    _ => (real.div_ceil(world) * world).min(rows),
                };
                // First the full batches of the group, then what stands before it.
                let whole = members.len() - members.len() % rows as usize;
                let ring = if flows { &line } else { &members };
                let behind = if flows { line.len() - before.len() } else { 0 };
                let back = ring.iter().rev().cycle().skip(behind);
                let again = members[..whole].iter().chain(back);
                let again = again.take((size - real) as usize);
                let mut ids: Vec<_> = part.iter().map(|id| Some(*id)).collect();
                let pads = self.last == LastBatch::Pad;
                ids.extend(again.map(|id| pads.then_some(*id)));
                match real < rows && flows {
                    true => short = Some((group, real, ids)),
                    false => batches.push((group, real, ids)),
                }
            }
        }
        let order = permuted(batches.len(), key.map(|key| key.named("batches")));
        let mut all: Vec<_> = order.into_iter().map(|of| batches[of].clone()).collect();
        all.extend(short);
        let mut out = Vec::new();
        for (number, (group, real, ids)) in all.iter().enumerate() {
            let mut rank = 0;
            let mut row = 0;
            let size = ids.len() as u64;
            for (place, id) in (0..).zip(ids) {
                while row == (0..size).filter(|place| place % world == rank).count() as u64 {
                    rank += 1;
                    row = 0;
                }
                out.push((number as u64, *group, rank, row, *id, place < *real));
                row += 1;
            }
        }
        out.sort_unstable();
        out
    }

    /// All samples by group, each group in its order.
    fn line(&self, shuffle: &dyn Fn(usize, &str, usize) -> Vec<usize>) -> Vec<u64> {
        let mut line = Vec::new();
        for group in 0..=usize::from(*self.of.iter().max().unwrap()) {
            let own = own(&self.of, group);
            let places = shuffle(own.len(), "samples", group);
            line.extend(places.into_iter().map(|k| own[k]));
        }
        line
    }
}

#[test]
fn grouped_batches_are_those_of_a_list() {
    let every = std::env::var_os("FEEDLINE_SWEEP").is_some();
    let cases = if every { 100_000 } else { 10_000 };
    for number in 0..cases {
        let case = Case::draw(number);
        let world = 1 + number % case.world_max;
        let taken = case.taken(world, 0);
        let right = case.naive(world);
        assert_eq!(taken, right, "{number}: {case:?}, {world} ranks");
        let (_, batches) = case.order(0, world);
        // By the list: as many batches and samples as announced, each sample once.
        let count = right.last().map_or(0, |row| row.0 + 1);
        assert_eq!(batches.count(), count, "{number}");
        for rank in 1..world {
            let (_, batches) = case.order(rank, world);
            assert_eq!(batches.count(), count, "{number}: rank {rank}");
        }
        let real = taken.iter().filter(|row| row.5);
        let mut real: Vec<u64> = real.filter_map(|row| row.4).collect();
        assert_eq!(real.len() as u64, batches.samples(), "{number}");
        real.sort_unstable();
        real.dedup();
        assert_eq!(real.len() as u64, batches.samples(), "{number}");
        let is_whole = real.len() == case.of.len();
        assert!(case.last == LastBatch::Drop || is_whole, "{number}");
        let most = taken.iter().map(|row| row.3 + 1).max().unwrap_or(0);
        assert!(most <= u64::from(batches.rows_max()), "{number}");
        // What is told before the first batch is what comes.
        let samples = case.of.len() as u64;
        let repeated = taken.iter().filter(|row| !row.5 && row.4.is_some()).count() as u64;
        let left_out = samples - real.len() as u64;
        let told = Counts {
            samples,
            batches: batches.count(),
            repeated,
            left_out,
        };
        assert_eq!(batches.counts(), told, "{number}: {case:?}, {world} ranks");
        let rows = case.rows();
        let largest = usize::from(*case.of.iter().max().unwrap());
        let off = repeated + left_out;
        match &case.bounds {
            Some(_) => assert!(off < rows[largest], "{number}: {case:?}, {told:?}"),
            None if case.last == LastBatch::Pad => {
                assert!(repeated <= rows.len() as u64 * (world - 1), "{told:?}")
            }
            None => {}
        }
        let mut of_batch = vec![(0, 0); batches.count() as usize];
        for (batch, group, _, _, id, _) in &taken {
            let own = id.map_or(*group, |id| usize::from(case.of[id as usize]));
            let is_below = own < *group && case.bounds.is_some();
            assert!(own == *group || is_below, "{number}: {own} in {group}");
            let (rows, _) = of_batch[*batch as usize];
            of_batch[*batch as usize] = (rows + 1, *group);
        }
        if let (Rows::Budget(most, _), Some(bounds)) = (&case.rows, &case.bounds) {
            let mut all = of_batch.iter();
            let fits = all.all(|(rows, group)| rows * bounds[*group] <= *most);
            assert!(fits, "{number}: {of_batch:?}");
        }
    }
}

#[test]
fn the_rest_after_any_grouped_batch_is_the_same_for_any_world() {
    /// Ids by batch: the order of rows among ranks is that of the position.
    fn samples(mut taken: Vec<Taken>, pads_are_fixed: bool) -> Vec<(u64, usize, Option<u64>)> {
        taken.retain(|row| row.4.is_some() && (row.5 || pads_are_fixed));
        taken.sort_by_key(|row| (row.0, row.2, row.3));
        taken.into_iter().map(|row| (row.0, row.1, row.4)).collect()
    }
    for number in 0..5_000 {
        let case = Case::draw(number);
        let (_, batches) = case.order(0, 1);
        // The world decides how many rows fill up the batch of a group that ends apart.
        let pads_are_fixed = case.bounds.is_some();
        for from in 0..=batches.count() {
            let all = samples(case.taken(1, 0), pads_are_fixed);
            let rest: Vec<_> = all.into_iter().filter(|row| row.0 >= from).collect();
            let world = 1 + (number + from) % case.world_max;
            let found = samples(case.taken(world, from), pads_are_fixed);
            assert_eq!(found, rest, "{number}: {case:?} from {from} by {world}");
        }
    }
}

/// A random part of a group goes up, and comes to any row of the batches there.
#[test]
fn what_is_left_of_a_group_is_drawn_anew_each_epoch() {
    let case = |epoch| Case {
        of: vec![0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1],
        bounds: Some(vec![3, 5]),
        rows: Rows::Each(vec![4, 3]),
        last: LastBatch::Keep,
        shuffled: Some(5),
        epoch,
        world_max: 1,
    };
    let mut up = [0; 6];
    let mut rows = [0; 3];
    let mut together = 0;
    for epoch in 0..6_000 {
        let mut moved = case(epoch).taken(1, 0);
        moved.retain(|row| row.1 == 1 && row.4.unwrap() < 6);
        assert_eq!(moved.len(), 2, "6 samples in batches of 4");
        for row in &moved {
            up[row.4.unwrap() as usize] += 1;
            rows[row.3 as usize] += 1;
        }
        together += i32::from(moved[0].0 == moved[1].0);
    }
    let third = 1_850..2_150_i32;
    assert!(up.iter().all(|count| third.contains(count)), "{up:?}");
    let third = 3_800..4_200_i32;
    assert!(rows.iter().all(|count| third.contains(count)), "{rows:?}");
    // 9 members in three batches of three rows: two of them share a batch by 2 in 8.
    assert!((1_380..1_620).contains(&together), "{together}");
}

#[test]
fn the_kth_sample_of_a_group_is_found_in_any_block() {
    for (groups, len) in [(1, 3000), (2, 5000), (16, 20_000), (256, 150_000)] {
        let mut draws = Draws::new(len, 0, 0, "table");
        // Skewed, so that some groups are rare or have no samples.
        let of: Box<[u8]> = (0..len)
            .map(|_| (draws.next_f64().powi(3) * groups as f64) as u8)
            .collect();
        let table = Table::new(of.clone(), groups).unwrap();
        for group in 0..groups {
            let own = own(&of, group);
            assert_eq!(table.sizes[group], own.len() as u64);
            let step = (own.len() / if groups > 99 { 3 } else { 100 }).max(1);
            for (k, id) in own.iter().enumerate().step_by(step) {
                let found = table.select(group, k as u64);
                assert_eq!(found, *id, "{groups} groups, sample {k} of {group}");
            }
        }
        let more = (table.bytes() - of.len()) as f64 / len as f64;
        let most = 0.02 + 4.0 * groups as f64 / len as f64;
        assert!(more < most, "{groups}: {more}");
    }
}

#[test]
fn any_sample_of_the_group_may_stand_in() {
    let rows = Rows::Each(vec![2, 3, 1]);
    let case = Case {
        of: vec![0, 1, 1, 0, 2, 1, 0, 1],
        bounds: None,
        rows,
        ..Case::draw(1)
    };
    let (order, batches) = case.order(0, 1);
    let mut draws = Draws::new(3, 0, 0, "stand in");
    for batch in 0..batches.count() {
        let group = batches.group(batch).unwrap();
        let position = batches.position(batch, 0);
        let mut another = || order.id(order.another(position, &mut draws)).unwrap();
        let mut seen: Vec<u64> = (0..200).map(|_| another()).collect();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen, own(&case.of, usize::from(group)));
    }
}

#[test]
fn lengths_make_groups_and_a_budget_their_batches() {
    let lengths = [1, 10, 11, 100, 0, 64];
    let groups = Groups::by(lengths, &[10, 64, 100]).unwrap();
    assert_eq!(&*groups.table.of, [0, 0, 1, 2, 0, 1]);
    assert_eq!(&*groups.table.sizes, [3, 2, 1]);
    let budget = groups.clone().budget(640);
    assert_eq!(&*budget.rows(7).unwrap(), [64, 10, 6]);
    let budget = budget.multiple_of(4);
    assert_eq!(&*budget.rows(7).unwrap(), [64, 8, 4]);
    assert_eq!(&*groups.clone().rows(7).unwrap(), [7, 7, 7]);
    assert_eq!(&*groups.batch_sizes([3, 2, 1]).rows(7).unwrap(), [3, 2, 1]);
}

#[test]
fn impossible_groups_are_refused_with_their_numbers() {
    let message = |error: Error| (error.kind(), error.message().to_owned());
    let config = |words: &str| (ErrorKind::Config, words.to_owned());
    let none: &[u64] = &[];
    for (bounds, words) in [
        (none, "0 bounds of groups; give 1 to 256"),
        (
            &[5, 5],
            "the bounds of groups must ascend, not go from 5 to 5",
        ),
    ] {
        let error = Groups::by([1], bounds).unwrap_err();
        assert_eq!(message(error), config(words));
    }
    let error = Groups::by([1, 2, 9], &[4, 8]).unwrap_err();
    assert_eq!(error.site().sample, Some(2));
    let words = "the sample has length 9, but the last bound of the groups is 8: \
         raise the bound, or cut the lengths";
    assert_eq!(message(error), config(words));

    let groups = Groups::by([1, 2, 9], &[4, 10]).unwrap();
    let plan = |groups: &Groups, len, world| {
        let rank = Rank::new(0, world).unwrap();
        let plan = Plan::of_groups(groups, len, 6, LastBatch::Keep, rank);
        plan.map_err(message).map(|plan| plan.largest())
    };
    assert_eq!(plan(&groups, 3, 6), Ok(6));
    let words = "the groups have 3 samples, but the dataset has 4";
    assert_eq!(plan(&groups, 4, 1), Err(config(words)));
    let words = "the batches of group 0 have 6 rows for 7 ranks: some would have none; make them \
         larger, or use fewer ranks";
    assert_eq!(plan(&groups, 3, 7), Err(config(words)));
    for (groups, words) in [
        (
            groups.clone().batch_sizes([3]),
            "1 batch sizes for 2 groups; give one for each",
        ),
        (
            groups.clone().batch_sizes([3, 4, 5]),
            "3 batch sizes for 2 groups; give one for each",
        ),
        (
            groups.clone().budget(39).multiple_of(4),
            "a budget of 39 has no room for 4 rows of up to 10 (group 1): give 40 or more",
        ),
        (
            groups.budget(39).multiple_of(0),
            "batch sizes must be a multiple of 1 or more, not of 0",
        ),
    ] {
        assert_eq!(plan(&groups, 3, 1), Err(config(words)));
    }
    let two = || Groups::of([0, 1]).unwrap();
    let words = "a budget needs lengths: make the groups by lengths, or give batch sizes";
    assert_eq!(plan(&two().budget(9), 2, 1), Err(config(words)));
    for order in [
        Order::indices([0, 1]),
        Order::windowed(1, 2),
        Order::sequential().lanes(2),
    ] {
        let planned = order
            .grouped(two())
            .planned(2, 1, LastBatch::Keep, Rank::single());
        let error = planned.unwrap_err();
        assert!(
            error.message().contains("groups need a shuffled"),
            "{error}"
        );
    }
    let preview = Order::shuffled(1).grouped(two()).preview(2, 0, 1);
    let error = preview.unwrap_err();
    assert!(error.message().contains("ask the loader"), "{error}");
}

#[test]
fn groups_without_samples_make_no_batches_and_no_room() {
    let groups = Groups::by([7, 7, 7], &[1, 7, 9])
        .unwrap()
        .batch_sizes([1000, 2, 500]);
    let counts = |samples, batches, repeated, left_out| Counts {
        samples,
        batches,
        repeated,
        left_out,
    };
    let plan = Plan::of_groups(&groups, 3, 1, LastBatch::Mask, Rank::new(0, 2).unwrap()).unwrap();
    assert_eq!((plan.largest(), plan.len()), (2, 3));
    assert_eq!(plan.counts(), counts(3, 2, 0, 0));
    let dropped = Plan::of_groups(&groups, 3, 1, LastBatch::Drop, Rank::single()).unwrap();
    assert_eq!((dropped.len(), dropped.counts()), (3, counts(3, 1, 0, 1)));
    // Where no group has enough for a batch, all of them together may.
    let few = Groups::by([1, 5, 7], &[1, 5, 7]).unwrap();
    let few = few.batch_sizes([3, 3, 3]);
    let plan = Plan::of_groups(&few, 3, 1, LastBatch::Pad, Rank::single()).unwrap();
    assert_eq!(plan.rows().collect::<Vec<_>>(), [0, 0, 3]);
    assert_eq!(plan.counts(), counts(3, 1, 0, 0));
}

#[test]
fn an_identity_tells_groups_and_batch_sizes_apart() {
    let plan = |of: &[u8], rows: &[u64]| {
        let groups = Groups::of(of.iter().copied()).unwrap().batch_sizes(rows);
        Plan::of_groups(&groups, of.len() as u64, 1, LastBatch::Keep, Rank::single())
            .unwrap()
            .identity()
    };
    let one = plan(&[0, 1, 0, 1, 1, 0, 0, 1, 1], &[2, 3]);
    assert_eq!(one, plan(&[0, 1, 0, 1, 1, 0, 0, 1, 1], &[2, 3]));
    assert_ne!(one, plan(&[0, 1, 0, 1, 1, 0, 0, 1, 0], &[2, 3]));
    assert_ne!(one, plan(&[0, 1, 0, 1, 1, 0, 0, 1, 1], &[2, 4]));
}

/// The share of padding in groups with these bounds.
fn padding(lengths: &[u64], bounds: &[u64]) -> f64 {
    let groups = Groups::by(lengths.iter().copied(), bounds).unwrap();
    let sizes = groups.table.sizes.iter().zip(bounds);
    let padded: u64 = sizes.map(|(samples, bound)| samples * bound).sum();
    1.0 - lengths.iter().sum::<u64>() as f64 / padded as f64
}

/// Lengths like those of web text: lognormal, cut at 4096.
#[test]
fn length_groups_save_most_of_the_padding() {
    let mut draws = Draws::new(5, 0, 0, "lengths");
    let normal = |draws: &mut Draws| (0..12).map(|_| draws.next_f64()).sum::<f64>() - 6.0;
    let lengths: Vec<u64> = (0..200_000)
        .map(|_| ((6.2 + 1.1 * normal(&mut draws)).exp() as u64).clamp(8, 4096))
        .collect();
    let mut sorted = lengths.clone();
    sorted.sort_unstable();
    let equal = |count: usize| {
        let mut bounds: Vec<u64> = (1..=count)
            .map(|n| sorted[n * sorted.len() / count - 1])
            .collect();
        bounds.dedup();
        bounds
    };
    for (count, most) in [(1, 0.85), (16, 0.10), (32, 0.05), (64, 0.03)] {
        let groups = Groups::by_length(&lengths, count).unwrap();
        let bounds = groups.bounds();
        assert_eq!((bounds.len(), bounds[count - 1]), (count, 4096));
        let best = padding(&lengths, bounds);
        let equal = padding(&lengths, &equal(count));
        println!("{count} groups: share of padding {best:.4}, of equal counts {equal:.4}");
        assert!(best < most, "{count} groups: {best}");
        assert!(best <= equal, "{count} groups: {best}, {equal}");
    }
}

#[test]
fn no_other_bounds_leave_less_padding() {
    for number in 0..3_000 {
        let mut draws = Draws::new(number, 0, 0, "bounds");
        let values = 1 + draws.below(7);
        let count = 1 + draws.below(5) as usize;
        let most = [9, 100, 5000][draws.below(3) as usize];
        let values: Vec<u64> = (0..values).map(|_| draws.below(most)).collect();
        let lengths: Vec<u64> = (0..1 + draws.below(40))
            .map(|_| values[draws.below(values.len() as u64) as usize])
            .collect();
        let mut distinct = lengths.clone();
        distinct.sort_unstable();
        distinct.dedup();
        let padded = |bounds: &[u64]| -> u64 {
            let bound = |length: &u64| bounds[bounds.partition_point(|bound| bound < length)];
            lengths.iter().map(bound).sum()
        };
        let last = distinct.pop().unwrap();
        let choices =
            (0_u32..1 << distinct.len()).filter(|choice| (choice.count_ones() as usize) < count);
        let bounds = |choice: u32| {
            let kept = (0..distinct.len()).filter(|bit| choice & (1 << bit) != 0);
            let kept = kept.map(|bit| distinct[bit]);
            kept.chain([last]).collect::<Vec<_>>()
        };
        let right = choices.map(|choice| padded(&bounds(choice))).min().unwrap();
        let groups = Groups::by_length(&lengths, count).unwrap();
        let found = groups.bounds();
        assert!(found.len() <= count, "{number}: {groups:?}");
        assert!(found.is_sorted_by(|a, b| a < b), "{number}: {groups:?}");
        let case = format!("{number}: {lengths:?} in {count}: {found:?}");
        assert_eq!(padded(found), right, "{case}");
    }
}

#[test]
fn bounds_end_with_the_greatest_length() {
    let bounds =
        |lengths: &[u64], count| Groups::by_length(lengths, count).unwrap().bounds().to_vec();
    assert_eq!(bounds(&[], 4), [0]);
    assert_eq!(bounds(&[7, 7], 4), [7]);
    assert_eq!(bounds(&[3, 9, 3, 5], 8), [3, 5, 9]);
    let long = bounds(&[0, u64::MAX, 5, 1 << 40], 3);
    assert_eq!(long, [5, 1 << 40, u64::MAX]);
    // Long ones that share a bin: its greatest is the bound.
    let alike = bounds(&[1 << 20, (1 << 20) + 1, 1 << 21], 3);
    assert_eq!(alike, [(1 << 20) + 1, 1 << 21]);
    for count in [0, 257] {
        let error = Groups::by_length(&[1], count).unwrap_err();
        let words = format!("{count} groups of lengths; give 1 to 256");
        assert_eq!(error.message(), words);
    }
}

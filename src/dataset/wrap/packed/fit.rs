//! Assigns pieces of documents to bins: best fit decreasing, or in turn. Pure.
//!
//! ```text
//! pieces ──longest first──► the bin with the least room that holds the piece, else a new one
//! bins ──► numbered by their first piece; a bin's pieces stand in their first order
//! ```

/// A document, or a part of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Item {
    pub(super) document: u32,
    /// Number of the part among the parts that fill a bin alone; `None` for a whole document, or
    /// for the rest after its full parts. For concatenated documents, the first token if it is not
    /// 0.
    pub(super) part: Option<u32>,
    /// Number of tokens, from 1 to the bin's room.
    pub(super) len: u32,
}

/// Size of a bin.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Bin {
    /// Tokens.
    pub(super) room: u32,
    /// Items.
    pub(super) most: u32,
}

/// The bin of each item, and the number of bins. Bins are numbered by their first items.
pub(super) fn bins(items: &[Item], size: Bin) -> (Vec<u32>, usize) {
    // Longest first; items of equal length keep their order.
    let mut order: Vec<u64> = items
        .iter()
        .enumerate()
        .map(|(at, item)| u64::from(size.room - item.len) << 32 | at as u64)
        .collect();
    order.sort_unstable();
    let mut open = Open::new(size);
    let mut bin_of = vec![0; items.len()];
    for key in order {
        let at = key as u32 as usize;
        bin_of[at] = open.put(items[at].len);
    }
    let mut renamed = vec![u32::MAX; open.sizes.len()];
    let mut count = 0;
    for bin in &mut bin_of {
        let name = &mut renamed[*bin as usize];
        if *name == u32::MAX {
            *name = count;
            count += 1;
        }
        *bin = *name;
    }
    (bin_of, count as usize)
}

/// Bins that are filled in turn.
#[derive(Default)]
pub(super) struct InTurn {
    items: Vec<Item>,
    bin_of: Vec<u32>,
    bins: u32,
    /// Tokens and items for which the last bin still has room.
    left: Bin,
}

impl InTurn {
    /// Puts a document of `len` tokens into the last bin, and the tokens that do not fit into new
    /// bins. Returns whether it was split.
    pub(super) fn put(&mut self, document: u32, len: u64, size: Bin) -> bool {
        let mut from = 0;
        let first = self.items.len();
        while from < len {
            if self.is_full() {
                self.bins += 1;
                self.left = size;
            }
            let taken = (len - from).min(self.left.room.into());
            self.left = Bin {
                room: self.left.room - taken as u32,
                most: self.left.most - 1,
            };
            self.bin_of.push(self.bins - 1);
            self.items.push(Item {
                document,
                part: (from > 0).then_some(from as u32),
                len: taken as u32,
            });
            from += taken;
        }
        self.items.len() > first + 1
    }

    fn is_full(&self) -> bool {
        self.left.room == 0 || self.left.most == 0
    }

    /// Takes out the items of full bins, and with `all` also those of the last bin. The second
    /// value is like the result of [`bins`].
    pub(super) fn take(&mut self, all: bool) -> (Vec<Item>, (Vec<u32>, usize)) {
        let all = all || self.is_full();
        let full = self
            .bin_of
            .partition_point(|bin| all || bin + 1 < self.bins);
        let rest = self.items.split_off(full);
        let bins = self.bins - u32::from(!rest.is_empty());
        self.bin_of.truncate(full);
        let bin_of = std::mem::replace(&mut self.bin_of, vec![0; rest.len()]);
        self.bins = u32::from(!rest.is_empty());
        (
            std::mem::replace(&mut self.items, rest),
            (bin_of, bins as usize),
        )
    }

    pub(super) fn len(&self) -> usize {
        self.items.len()
    }
}

/// Bins with room left: a stack of bins for each size of room, and a tree of bits that marks the
/// sizes with a bin.
struct Open {
    size: Bin,
    /// For each size of room, the last bin with it, plus 1.
    last: Vec<u32>,
    /// For each bin, the bin before it in its stack, plus 1.
    before: Vec<u32>,
    /// Number of items of each bin.
    sizes: Vec<u32>,
    /// A bit of a level stands for 64 bits of the level before it.
    levels: Vec<Vec<u64>>,
}

impl Open {
    fn new(size: Bin) -> Self {
        let rooms = size.room as usize + 1;
        let mut levels = Vec::new();
        let mut bits = rooms;
        while bits > 1 {
            bits = bits.div_ceil(64);
            levels.push(vec![0; bits]);
        }
        Self {
            size,
            last: vec![0; rooms],
            before: Vec::new(),
            sizes: Vec::new(),
            levels,
        }
    }

    /// Puts an item of `len` tokens into a bin, and returns the bin's number.
    fn put(&mut self, len: u32) -> u32 {
        let (bin, room) = match self.least(len as usize) {
            Some(room) => (self.pop(room), room as u32),
            None => {
                self.before.push(0);
                self.sizes.push(0);
                (self.sizes.len() as u32 - 1, self.size.room)
            }
        };
        self.sizes[bin as usize] += 1;
        if room > len && self.sizes[bin as usize] < self.size.most {
            self.push(bin, (room - len) as usize);
        }
        bin
    }

    fn pop(&mut self, room: usize) -> u32 {
        let bin = self.last[room] - 1;
        self.last[room] = self.before[bin as usize];
        let mut at = room;
        // An emptied word clears its bit in the next level.
        for level in self.levels.iter_mut().take_while(|_| self.last[room] == 0) {
            level[at / 64] &= !(1 << (at % 64));
            if level[at / 64] != 0 {
                break;
            }
            at /= 64;
        }
        bin
    }

    fn push(&mut self, bin: u32, room: usize) {
        self.before[bin as usize] = std::mem::replace(&mut self.last[room], bin + 1);
        let mut at = room;
        for level in &mut self.levels {
            level[at / 64] |= 1 << (at % 64);
            at /= 64;
        }
    }

    /// The smallest room of an open bin that is at least `from`.
    fn least(&self, from: usize) -> Option<usize> {
        let mut at = from;
        for (depth, level) in self.levels.iter().enumerate() {
            let word = level
                .get(at / 64)
                .map_or(0, |word| word & (u64::MAX << (at % 64)));
            if word != 0 {
                let mut found = at / 64 * 64 + word.trailing_zeros() as usize;
                for below in self.levels[..depth].iter().rev() {
                    found = found * 64 + below[found].trailing_zeros() as usize;
                }
                return Some(found);
            }
            at = at / 64 + 1;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The same algorithm with a plain list of bins.
    fn naive(items: &[Item], size: Bin) -> Vec<u32> {
        let mut order: Vec<usize> = (0..items.len()).collect();
        order.sort_by_key(|at| std::cmp::Reverse(items[*at].len));
        // For each bin: its room, when it was last touched, and its number of items.
        let mut bins = Vec::<(u32, usize, u32)>::new();
        let mut bin_of = vec![0; items.len()];
        for (time, at) in order.into_iter().enumerate() {
            let len = items[at].len;
            let fits = bins
                .iter()
                .enumerate()
                .filter(|(_, (left, _, count))| *left >= len && *count < size.most);
            let best = fits
                .min_by_key(|(_, (left, touched, _))| (*left, std::cmp::Reverse(*touched)))
                .map(|(bin, _)| bin);
            let bin = best.unwrap_or_else(|| {
                bins.push((size.room, 0, 0));
                bins.len() - 1
            });
            bins[bin] = (bins[bin].0 - len, time + 1, bins[bin].2 + 1);
            bin_of[at] = bin as u32;
        }
        let mut names = Vec::new();
        for bin in &mut bin_of {
            let name = names
                .iter()
                .position(|known| known == bin)
                .unwrap_or_else(|| {
                    names.push(*bin);
                    names.len() - 1
                });
            *bin = name as u32;
        }
        bin_of
    }

    proptest! {
        #[test]
        fn bins_are_those_of_a_naive_best_fit(
            room in 1_u32..9000, most in 1_u32..20, lens in prop::collection::vec(0_u32..9000, 0..200),
        ) {
            let size = Bin { room, most };
            let item = |(at, len): (usize, &u32)| Item { document: at as u32, part: None, len: 1 + len % room };
            let items: Vec<Item> = lens.iter().enumerate().map(item).collect();
            let (bin_of, count) = bins(&items, size);
            prop_assert_eq!(&bin_of, &naive(&items, size));
            prop_assert_eq!(count, bin_of.iter().max().map_or(0, |last| *last as usize + 1));
            let mut filled = vec![0; count];
            items.iter().zip(&bin_of).for_each(|(item, bin)| filled[*bin as usize] += item.len);
            prop_assert!(filled.iter().all(|tokens| *tokens <= room));
        }
    }
}

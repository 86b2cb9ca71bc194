//! How samples become rows: ask the dataset once, check, fetch the bytes, fill the row, and add the
//! location to errors.
//!
//! ```text
//! id ──ask──► pieces ──┬─ reserve, read (planner) ─────────┬──► given bytes ──fill──► open, decode/copy, map ──► row
//!                      └─ fetch (page cache, plain calls) ─┘         ▲
//! a row of an open chunk ────────────────────────────────────────────┘
//! ```
//!
//! The dataset is user or third-party code. [`Samples::ask`] checks its answers, and all later code
//! relies on these checks. Index bytes without a decoder are written into the row immediately.

use super::recipe::{Drawn, How, Recipe};
use super::task::{EpochJob, Piece, Place, RowRun, Sample};
use super::watchdog::{Doing, Watch};
use feedline_base::error::{Error, ErrorKind, Result, Stage, caught};
use feedline_core::dataset::{
    ChunkBuf, Chunked, Dataset, FieldPart, Framed, Part, Parts, Sizes, field_bytes, lie, make,
    make_in, placed, unframed, within_opened,
};
use feedline_core::decode::{Ctx, Running, Scratch};
use feedline_core::memory::{Row, Rows};
use feedline_core::storage::{Extent, Sources, exhausted, has_other_version, out_of_reach};
use feedline_reader::Cached;
use std::sync::Arc;

/// Everything that turns samples into rows; shared by all threads.
pub(crate) struct Samples {
    pub(crate) dataset: Arc<dyn Dataset>,
    pub(crate) sources: Arc<Sources>,
    /// The first sample of every chunk, then the number of all samples, as `build()` found them.
    pub(crate) chunk_starts: Option<Arc<[u64]>>,
    pub(crate) recipe: Recipe,
    pub(crate) seed: u64,
    /// Heap bytes that decoders may use on each worker.
    pub(crate) scratch_limit: usize,
    /// The sizes that the dataset gave to `build()`; the memory plan is based on them.
    pub(crate) promised: Sizes,
    pub(crate) watch: Arc<Watch>,
}

/// The bytes of one field, as stored in the dataset's source.
pub(crate) struct Given<'b> {
    pub(crate) field: usize,
    pub(crate) bytes: &'b [u8],
    /// The bytes go through `Framed::check`, only once if several fields share them.
    pub(crate) checked: bool,
    /// The bytes go through `Framed::open`.
    pub(crate) framed: bool,
    /// The offset of the bytes in the row, for a field of several parts.
    pub(crate) at: Option<usize>,
    /// Origin of the bytes, for errors.
    pub(crate) extent: Option<Extent>,
}

/// Queries to the dataset.
impl Samples {
    /// Asks for the parts of sample `id` that the host needs. Index bytes go directly into the
    /// first row.
    pub(crate) fn ask(&self, id: u64, sample: &mut Sample, rows: &mut Rows) -> Result<()> {
        sample.clear();
        sample.id = Some(id);
        let mut parts = Parts::new();
        self.parts(id, &mut parts)?;
        let mut before = None;
        let mut at = 0;
        for FieldPart {
            field,
            part,
            is_last,
        } in parts.iter()
        {
            let handler = &self.recipe.handlers[field];
            let place = match (part, &handler.how) {
                (_, How::Skip | How::Direct) => continue,
                _ if part.follows() || !is_last => {
                    let start = if part.follows() { at } else { 0 };
                    at = self.join(field, part, start, is_last, sample, rows)?;
                    continue;
                }
                (Part::Made, How::InPlace(_)) => {
                    let mut row = rows.row();
                    let out = row.bytes_mut(handler.outputs.start);
                    make_in(&*self.dataset, id, field, out)
                        .map_err(|error| error.with_field(&handler.name))?;
                    continue;
                }
                (Part::Made, _) => {
                    let start = sample.index.len();
                    make(&*self.dataset, id, field, &mut sample.index)
                        .map_err(|error| error.with_field(&handler.name))?;
                    Place::Index(start, sample.index.len() - start)
                }
                (Part::Inline(bytes), How::Decode(_)) => {
                    sample.index.extend_from_slice(bytes);
                    Place::Index(sample.index.len() - bytes.len(), bytes.len())
                }
                (Part::Inline(bytes), _) => {
                    self.copy(field, &mut rows.row(), bytes)?;
                    continue;
                }
                _ if part.extent().is_some_and(|extent| self.is_memory(&extent)) => Place::Memory,
                _ if part.shares(before.replace(part)) => Place::Same,
                (Part::Extent(Extent { len, .. }), How::InPlace(row_bytes))
                    if len == *row_bytes as u64 =>
                {
                    Place::Row
                }
                _ => Place::Storage,
            };
            let checked = part.is_checked();
            let framed = matches!(part, Part::Framed(_));
            sample.pieces.push(Piece {
                checked,
                framed,
                ..Piece::new(field, part.extent(), place)
            });
        }
        Ok(())
    }

    /// Places one of several parts of a field in the first row, from byte `start` on, and returns
    /// its end offset.
    fn join(
        &self,
        field: usize,
        part: Part<'_>,
        start: usize,
        is_last: bool,
        sample: &mut Sample,
        rows: &mut Rows,
    ) -> Result<usize> {
        let handler = &self.recipe.handlers[field];
        let end = start.saturating_add(part.len());
        let name = &handler.name;
        let How::InPlace(row_bytes) = handler.how else {
            let message = format!(
                "field `{name}` is stored in several extents: it needs a fixed shape and no decoder"
            );
            return Err(Error::new(ErrorKind::Config, Stage::Read, message));
        };
        if end > row_bytes || (is_last && end < row_bytes) {
            let message = format!("field `{name}` takes {row_bytes} bytes, the sample has {end}");
            return Err(Error::new(ErrorKind::Shape, Stage::Read, message));
        }
        if let Part::MoreInline(bytes) = part {
            rows.row().bytes_mut(handler.outputs.start)[start..end].copy_from_slice(bytes);
        } else {
            let in_memory = part.extent().is_some_and(|extent| self.is_memory(&extent));
            let place = if in_memory { Place::Memory } else { Place::Row };
            sample.pieces.push(Piece {
                at: Some(start),
                ..Piece::new(field, part.extent(), place)
            });
        }
        Ok(end)
    }

    /// The checked parts of a sample: every field of the schema has bytes exactly once; every
    /// extent is within its source.
    pub(crate) fn parts<'d>(&'d self, id: u64, parts: &mut Parts<'d>) -> Result<()> {
        parts.ask(
            &*self.dataset,
            &self.sources,
            self.recipe.handlers.len(),
            id,
        )?;
        parts.within(&self.promised)
    }

    /// Places the rows of packed fields by the lengths in the index, or by the maximum length. A
    /// row without a length gets no bytes; filling it reports why.
    pub(crate) fn place_packed(&self, job: &EpochJob, batch: u64, rows: &mut Rows, count: u32) {
        if self.recipe.packed.is_empty() {
            return;
        }
        // Only lengths from the index need a sample id; maximum lengths do not.
        let asks = self
            .recipe
            .packed
            .iter()
            .any(|(number, _)| number.is_some());
        for row in 0..rows.len() {
            let id = if asks && row < count {
                job.order.id(job.batches.position(batch, row)).ok()
            } else {
                None
            };
            for (number, field) in &self.recipe.packed {
                let len = number.map(|number| {
                    caught(Stage::Read, || {
                        id.map_or(Ok(None), |id| field_bytes(&*self.dataset, id, number))
                    })
                    .ok()
                    .flatten()
                    .unwrap_or(0)
                });
                rows.place(*field, row, if row < count { len } else { Some(0) });
            }
        }
    }

    /// Whether the extent is in a memory source.
    pub(crate) fn is_memory(&self, extent: &Extent) -> bool {
        self.sources.bytes_of(extent.source).is_some()
    }

    pub(crate) fn memory_bytes(&self, extent: &Extent) -> Result<&[u8]> {
        let all = self.sources.bytes_of(extent.source).unwrap_or_default();
        let range = extent.offset as usize..(extent.offset.saturating_add(extent.len)) as usize;
        all.get(range).ok_or_else(|| {
            let message = format!("the source has {} bytes", all.len());
            Error::new(ErrorKind::Truncated, Stage::Read, message)
                .with_range(extent.offset, extent.len)
        })
    }

    /// The dataset's access to chunks. The dataset is user code, so it may panic or answer
    /// differently than before.
    pub(crate) fn in_chunks(&self) -> Result<&dyn Chunked> {
        let said = "the dataset had chunks when the loader was built, and has none now";
        self.dataset
            .chunked()
            .ok_or_else(|| Error::new(ErrorKind::User, Stage::Read, said))
    }

    /// Asks for the extents of a chunk, and checks them.
    pub(crate) fn ask_chunk(&self, chunk: usize, sample: &mut Sample) -> Result<()> {
        let mut extents = Vec::new();
        let said = caught(Stage::Read, || {
            let chunks = self.in_chunks()?;
            chunks.chunk_extents(chunk, &mut extents)?;
            Ok(chunks.chunk_bytes(chunk).encoded)
        })?;
        extents
            .iter()
            .try_for_each(|extent| self.sources.check(extent))?;
        let bytes: u64 = extents
            .iter()
            .map(|extent| extent.len)
            .fold(0, u64::saturating_add);
        if bytes > said {
            return lie(format!(
                "the dataset promised a chunk of {said} encoded bytes, but its extents have \
                 {bytes}"
            ));
        }
        sample.pieces.extend(extents.iter().map(|extent| {
            let place = {
                if self.is_memory(extent) {
                    Place::Memory
                } else {
                    Place::Storage
                }
            };
            Piece::new(0, Some(*extent), place)
        }));
        Ok(())
    }

    pub(crate) fn rows_of_chunk(&self, chunk: usize) -> u64 {
        let starts = self
            .chunk_starts
            .as_ref()
            .and_then(|starts| starts.get(chunk..chunk + 2));
        starts.map_or(0, |starts| starts[1] - starts[0])
    }
}

/// Filling rows from bytes.
impl Samples {
    /// Fetches stored bytes with `fetch` into the first of `rows`, or one after the other into
    /// `buffer`. Chunks have no row. Returns false if bytes are missing or the buffer is too small;
    /// such a sample is not decoded.
    pub(crate) fn fetch(
        &self,
        sample: &mut Sample,
        mut rows: Option<&mut Rows>,
        buffer: &mut [u8],
        mut fetch: impl FnMut(&Extent, &mut [u8]) -> Cached,
    ) -> Result<bool> {
        let mut used = 0;
        for piece in &mut sample.pieces {
            let Some(extent) = piece.extent.filter(|extent| extent.len > 0) else {
                continue;
            };
            let fetched = match (&piece.place, &mut rows) {
                (Place::Row, Some(rows)) => {
                    let field = self.recipe.handlers[piece.field].outputs.start;
                    fetch(&extent, &mut rows.row().bytes_mut(field)[piece.in_row()])
                }
                (Place::Storage, _) => {
                    let start = used;
                    used += extent.len as usize;
                    let Some(to) = buffer.get_mut(start..used) else {
                        return Ok(false);
                    };
                    piece.place = Place::Buffer(start);
                    fetch(&extent, to)
                }
                _ => continue,
            };
            match fetched {
                Cached::Hit => {}
                Cached::Miss => return Ok(false),
                Cached::Failed(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// The bytes that fill a sample's row. All of them must be available.
    pub(crate) fn given<'b>(
        &'b self,
        sample: &'b Sample,
        buffer: &'b [u8],
    ) -> impl Iterator<Item = Result<Given<'b>>> + use<'b> {
        let mut last: &[u8] = &[];
        let mut checked = None;
        let given = move |piece: &'b Piece| {
            let len = piece.len() as usize;
            let bytes = match &piece.place {
                Place::Row => return None,
                Place::Memory => match piece
                    .extent
                    .as_ref()
                    .map(|extent| self.memory_bytes(extent))
                {
                    Some(Ok(bytes)) => bytes,
                    Some(Err(error)) => return Some(Err(error)),
                    None => &[],
                },
                Place::Index(start, len) => &sample.index[*start..][..*len],
                Place::Ring(span, start) => &span.as_slice()[*start..][..len],
                Place::Buffer(start) => &buffer[*start..][..len],
                Place::Same => last,
                // The extent is empty, so nothing was read.
                Place::Storage => &[],
            };
            if !matches!(piece.place, Place::Memory | Place::Index(..)) {
                last = bytes;
            }
            let Piece {
                field,
                framed,
                extent,
                at,
                ..
            } = *piece;
            let checked = piece.checked && checked.replace(extent) != Some(extent);
            Some(Ok(Given {
                field,
                bytes,
                checked,
                framed,
                at,
                extent,
            }))
        };
        sample.pieces.iter().filter_map(given)
    }

    /// The bytes that fill a row from row `row` of an open chunk.
    pub(crate) fn given_by_chunk<'b>(
        &'b self,
        chunk: &'b ChunkBuf,
        row: usize,
    ) -> impl Iterator<Item = Result<Given<'b>>> + use<'b> {
        self.recipe
            .handlers
            .iter()
            .enumerate()
            .map(move |(field, handler)| match chunk.row(field, row) {
                Some(bytes) => Ok(Given {
                    field,
                    bytes,
                    checked: false,
                    framed: false,
                    at: None,
                    extent: None,
                }),
                None => {
                    let message = format!("the chunk has no row {row} of field `{}`", handler.name);
                    Err(Error::new(ErrorKind::Decode, Stage::Decode, message))
                }
            })
    }

    /// Fills the first row with sample `id`: every field from its bytes, then the added and mapped
    /// fields.
    pub(crate) fn fill<'b>(
        &self,
        job: &EpochJob,
        id: u64,
        rows: &mut Rows,
        scratch: &mut Scratch,
        given: impl Iterator<Item = Result<Given<'b>>>,
    ) -> Result<()> {
        // Asked once per row.
        let framed = self.dataset.framed();
        // A substitute uses the draw number of the row's position, too. A mixture must search for
        // this number, as for the id, so it is determined only if needed.
        let draw = match self.recipe.may_draw() {
            true => job
                .order
                .draw(job.batches.position(rows.ticket().batch, rows.first()))?,
            false => 0,
        };
        let epoch = job.epoch;
        let drawn = Drawn { epoch, id, draw };
        for given in given {
            self.fill_field(drawn, rows, scratch, framed, given?)?;
        }
        self.finish(drawn, rows, scratch)
    }

    /// Fills the row from its fetched sample. All bytes must be available.
    pub(crate) fn fill_fetched(
        &self,
        run: &mut RowRun,
        sample: &Sample,
        scratch: &mut Scratch,
    ) -> Result<()> {
        let Some(id) = sample.id else {
            return lie("a row without a sample".into());
        };
        self.fill(
            &run.job,
            id,
            &mut run.rows,
            scratch,
            self.given(sample, &[]),
        )
    }

    /// Turns the bytes of one dataset field into the fields of its handler.
    fn fill_field(
        &self,
        drawn: Drawn,
        rows: &mut Rows,
        scratch: &mut Scratch,
        framed: Option<&dyn Framed>,
        given: Given<'_>,
    ) -> Result<()> {
        let Drawn { epoch, id, draw } = drawn;
        let handler = &self.recipe.handlers[given.field];
        if let Some(at) = given.at {
            let mut row = rows.row();
            row.bytes_mut(handler.outputs.start)[at..at + given.bytes.len()]
                .copy_from_slice(given.bytes);
            return Ok(());
        }
        scratch.field = Some(given.field);
        // `bytes` is the input of the failing code.
        let site = |error: Error, bytes: &[u8]| {
            let error = error.in_stage(Stage::Decode);
            let error = if self.recipe.handlers.len() > 1 {
                error.with_field(&handler.name)
            } else {
                error
            };
            match &given.extent {
                Some(extent) => self
                    .sources
                    .at(placed(error, bytes, given.bytes, extent), extent),
                None => error,
            }
        };
        if let Some(framed) = framed.filter(|_| given.checked) {
            scratch.running = Running::Check;
            framed
                .check(id, given.field, given.bytes)
                .map_err(|error| site(error, given.bytes))?;
        }
        // Taken out, because the decoder borrows the rest of the scratch.
        let mut opened = std::mem::take(&mut scratch.opened);
        opened.clear();
        let mut points = std::mem::take(&mut scratch.points);
        scratch.running = Running::Open;
        let bytes = match framed {
            _ if !given.framed => given.bytes,
            None => return unframed(),
            Some(framed) => framed
                .open(id, given.field, given.bytes, &mut opened)
                .and_then(|bytes| within_opened(bytes, given.bytes, self.promised.opened_bytes_max))
                .map_err(|error| site(error, given.bytes))?,
        };
        scratch.running = Running::Decoder;
        let mut row = rows.row();
        let done = match &handler.how {
            How::InPlace(_) | How::Copy => self
                .copy(given.field, &mut row, bytes)
                .map_err(|error| site(error, bytes)),
            How::Skip | How::Direct => Ok(()),
            How::Decode(decoder) => {
                handler
                    .outputs
                    .clone()
                    .for_each(|field| row.clear_len(field));
                let mut ctx = Ctx::new(self.seed, epoch, id, handler.outputs.clone(), scratch)
                    .with_draw(draw)
                    .with_scratch_limit(self.scratch_limit)
                    .with_seek_points(framed.map_or(&[], |framed| {
                        framed
                            .seek_points(id, given.field, &mut points)
                            .unwrap_or_default()
                    }));
                let mut own = row.only(mask(&handler.outputs));
                let by_index = self.recipe.is_by_index(given.field);
                let decoded = match by_index && own.stands_in() {
                    // A substitute's row stays empty: its space in the batch has the length of the
                    // failed sample.
                    true => own.set_len(handler.outputs.start, 0),
                    false => decoder
                        .decode(bytes, &mut ctx, &mut own)
                        .and_then(|()| own.pad_new(u64::MAX)),
                };
                decoded.map_err(|error| {
                    // A row of a packed field has no space if its length could not be determined.
                    // Then the error is why the length is unknown.
                    site(
                        caught(Stage::Read, || field_bytes(&*self.dataset, id, given.field))
                            .err()
                            .filter(|_| by_index)
                            .unwrap_or(error),
                        bytes,
                    )
                })
            }
        };
        scratch.opened = opened;
        scratch.points = points;
        scratch.field = None;
        done
    }

    /// Copies the bytes of a dataset field into the row. A substitute has no room in a field that
    /// is packed by lengths in the index.
    fn copy(&self, field: usize, row: &mut Row<'_>, bytes: &[u8]) -> Result<()> {
        let output = self.recipe.handlers[field].outputs.start;
        match row.stands_in() && self.recipe.is_by_index(field) {
            true => row.set_len(output, 0),
            false => row.copy_from(output, bytes),
        }
    }

    /// Adds the field to the error of a panic in the field's code.
    pub(crate) fn in_field(&self, error: Error, scratch: &Scratch) -> Error {
        match scratch.field.filter(|_| self.recipe.handlers.len() > 1) {
            Some(field) => error.with_field(&self.recipe.handlers[field].name),
            None => error,
        }
    }

    /// Maps and marks a row with complete fields.
    fn finish(&self, drawn: Drawn, rows: &mut Rows, scratch: &mut Scratch) -> Result<()> {
        let Drawn { epoch, id, draw } = drawn;
        let recipe = &self.recipe;
        if recipe.finishes_late() {
            rows.note_draw(draw);
        }
        let mut row = rows.row();
        recipe.added.clone().for_each(|field| row.clear(field));
        if !recipe.maps.is_empty() {
            scratch.running = Running::Map;
            self.watch
                .worker(scratch.worker, |cell| cell.begin(Doing::Mapping, Some(id)));
            for map in &recipe.maps {
                let fields = 0..recipe.spec.fields().len();
                let mut ctx = Ctx::new(self.seed, epoch, id, fields, scratch)
                    .with_draw(draw)
                    .with_scratch_limit(self.scratch_limit);
                let mapped =
                    map(&mut row, &mut ctx).and_then(|()| row.pad_new(mask(&recipe.added)));
                mapped.map_err(|error| error.in_stage(Stage::Map))?;
            }
            scratch.running = Running::Decoder;
        }
        if !recipe.finishes_late() {
            recipe.finish(&mut row, self.seed, drawn);
        }
        row.mark(id);
        Ok(())
    }
}

/// Adds locations to errors.
impl Samples {
    /// The schema index of the field that the error names.
    pub(crate) fn field_of(&self, error: &Error) -> Option<usize> {
        let name = error.site().field.as_ref()?;
        self.recipe
            .handlers
            .iter()
            .position(|handler| handler.name == *name)
    }

    /// Adds the sample's id to the error. If the error has no location, adds that of the sample's
    /// first bytes.
    pub(crate) fn named(&self, error: Error, sample: &Sample) -> Error {
        let Some(id) = sample.id else { return error };
        match sample.first_extent() {
            Some(extent) if error.site().path.is_none() => {
                self.sources.at(error.with_sample(id), &extent)
            }
            Some(_) => error.with_sample(id),
            None => self.named_by_id(error, id),
        }
    }

    /// Like [`named`](Self::named), but from the id alone.
    pub(crate) fn named_by_id(&self, error: Error, id: u64) -> Error {
        let error = error.with_sample(id);
        if error.site().path.is_some() {
            return error;
        }
        match &self.chunk_starts {
            Some(starts) if starts.last().is_some_and(|end| id < *end) => {
                return self
                    .named_as_chunk(error, starts.partition_point(|start| *start <= id) - 1);
            }
            _ => {}
        }
        // The dataset itself may have failed; a second panic must not escape.
        let first = caught(Stage::Read, || {
            let mut parts = Parts::new();
            // Even an answer that violates the dataset's contract is used, if it names a place.
            self.dataset.extents(id, &mut parts)?;
            let mut extents = parts
                .iter()
                .filter(|one| {
                    !matches!(
                        self.recipe.handlers.get(one.field).map(|own| &own.how),
                        Some(How::Skip)
                    )
                })
                .filter_map(|one| one.part.extent());
            Ok(extents.find(|extent| {
                extent.source.index() < self.sources.count() && !self.is_memory(extent)
            }))
        });
        match first.ok().flatten() {
            Some(extent) => self.sources.at(error, &extent),
            None => error,
        }
    }

    /// Adds the chunk's name and the location of its first bytes to the error, unless the error
    /// already has a location.
    pub(crate) fn named_as_chunk(&self, error: Error, chunk: usize) -> Error {
        if error.site().path.is_some() {
            return error;
        }
        let named = caught(Stage::Read, || {
            let chunks = self.in_chunks()?;
            let mut extents = Vec::new();
            chunks.chunk_extents(chunk, &mut extents)?;
            let first = extents
                .into_iter()
                .next()
                .filter(|first: &Extent| first.source.index() < self.sources.count());
            Ok(first.map(|first| (first, chunks.chunk_name(chunk))))
        });
        match named.ok().flatten() {
            Some((first, name)) => self.sources.at(error, &first).within(name),
            None => error,
        }
    }

    /// Whether a substitute may replace a sample that failed with `error`. No sample is to blame
    /// for a shortage of descriptors or memory, a device, a sampler's mistake, a cancellation or a
    /// stall. A picture is not to blame either if the memory budget leaves too little for it: it
    /// would fit a larger budget.
    pub(crate) fn blames_sample(&self, error: &Error) -> bool {
        let budgets = error.kind() == ErrorKind::Limit
            && error.stage() == Stage::Decode
            && self.scratch_limit < self.recipe.scratch_bytes();
        !budgets && is_the_samples(error)
    }
}

fn is_the_samples(error: &Error) -> bool {
    use ErrorKind as K;
    // A shortage of descriptors or memory, or an unreachable store, affects every sample. An object
    // with another version is another object, not a damaged one.
    if exhausted(error) || out_of_reach(error) || has_other_version(error) {
        return false;
    }
    matches!(
        error.kind(),
        K::NotFound
            | K::Permission
            | K::NotAFile
            | K::Empty
            | K::Truncated
            | K::Changed
            | K::Io
            | K::Decode
            | K::Limit
            | K::Shape
            | K::User
            | K::Panicked
    )
}

fn mask(range: &std::ops::Range<usize>) -> u64 {
    let below = |end: usize| if end >= 64 { u64::MAX } else { (1 << end) - 1 };
    below(range.end) & !below(range.start)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resource_exhaustion_is_not_blamed_on_the_sample() {
        let os = |code| Error::os(Stage::Read, "", std::io::Error::from_raw_os_error(code));
        for (error, is) in [
            (os(5), true),
            (os(2), true),
            (os(116), true),
            (os(12), false),
            (os(23), false),
            (os(24), false),
            (Error::decode(""), true),
            (Error::user(""), true),
            (Error::new(ErrorKind::Panicked, Stage::Map, ""), true),
            (Error::new(ErrorKind::Cancelled, Stage::Read, ""), false),
            (Error::new(ErrorKind::Config, Stage::Order, ""), false),
            (Error::new(ErrorKind::Device, Stage::Device, ""), false),
            (Error::new(ErrorKind::Stalled, Stage::Read, ""), false),
        ] {
            assert_eq!(is_the_samples(&error), is, "{error}");
        }
    }
}

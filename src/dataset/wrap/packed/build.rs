//! Settings of packed documents, and the packing.

use super::documents::{self, Access, InnerDocuments, Long, copied};
use super::estimate::Estimate;
use super::fit::{Bin, InTurn};
use super::table::{KIND, TableWriter};
use super::{MADE, Packed, RECENT, table};
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::sync::Hold;
use feedline_core::dataset::parallel::by_threads;
use feedline_core::dataset::{Dataset, Digest, Parts, TokenFields, kept, unordered};
use feedline_core::order::{Key, Permutation};
use feedline_core::storage::sidefile::{Recent, SideWriter};
use feedline_core::tensor::{DType, EncodedField, Field, bf16, f16};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::AtomicU64;

/// Maximum tokens of a bin.
const ROOM_MAX: usize = 1 << 22;
const DOCUMENTS_MAX: u64 = 1 << 31;
/// Maximum documents of a bin: the table keeps their number in 16 bits.
pub(super) const ITEMS_MAX: usize = 1 << 15;
/// Maximum threads that pack, and groups whose bins are in memory at the same time.
const THREADS_MAX: usize = 8;
const TOGETHER: usize = 32;

/// Builder of [`Packed`]. Made by [`DatasetExt::packed`](crate::dataset::DatasetExt::packed).
#[must_use]
pub struct PackedBuilder<D> {
    inner: D,
    /// The field of the documents, then the fields beside it.
    fields: Vec<String>,
    room: usize,
    key: Option<u64>,
    long: Long,
    padding: i64,
    /// Padding of single fields.
    paddings: Vec<(String, i64)>,
    documents_max: Option<usize>,
    rows: Option<PathBuf>,
    estimated: bool,
}

impl<D: Dataset> PackedBuilder<D> {
    pub(crate) fn new(inner: D, field: &str, room: usize) -> Self {
        Self {
            inner,
            fields: vec![field.into()],
            room,
            key: None,
            long: Long::Refuse,
            padding: 0,
            paddings: Vec::new(),
            documents_max: None,
            rows: None,
            estimated: false,
        }
    }

    /// Also packs these fields, which have an element for each token of a document: labels, a loss
    /// mask, weights. An element has the same position in the row as its token.
    pub fn beside<'n>(mut self, fields: impl IntoIterator<Item = &'n str>) -> Self {
        self.fields.extend(fields.into_iter().map(String::from));
        self
    }

    /// Packs the documents in an order shuffled by `key`. Default: the dataset's order, for data
    /// that is already shuffled.
    pub fn shuffled(mut self, key: u64) -> Self {
        self.key = Some(key);
        self
    }

    /// Splits documents that are longer than a bin into parts that fill a bin each, and a rest.
    /// Default: such a document is an error of `open`.
    pub fn split(mut self) -> Self {
        self.long = Long::Split;
        self
    }

    /// Cuts documents that are longer than a bin, instead of splitting them
    /// ([`split`](Self::split)); [`Packed::cut_tokens`] and the report count the tokens cut off.
    pub fn cut(mut self) -> Self {
        self.long = Long::Cut;
        self
    }

    /// Concatenates the documents, instead of packing by best fit: rows are full, and a document
    /// that crosses the end of a row continues in the next row, as a part with its own positions.
    /// Adjacent documents of a file are then one read.
    pub fn concatenated(mut self) -> Self {
        self.long = Long::Concatenate;
        self
    }

    /// Sets the maximum number of documents of a row, and with it the shape of `cu_seqlens`.
    /// Default: one for each 16 tokens of the row, and at least 64. If documents are shorter on
    /// average, rows stay partly empty.
    pub fn documents_max(mut self, documents: usize) -> Self {
        self.documents_max = Some(documents);
        self
    }

    /// Also keeps the rows in this file: their tokens, row after row. Opening writes the file if it
    /// does not exist, by one pass over the documents; it takes as much disk space as the tokens. A
    /// row is then one read, like a window of a token file, instead of a read for each document. A
    /// state saved with this file cannot resume without it, since the dataset's files differ.
    pub fn rows(mut self, file: impl Into<PathBuf>) -> Self {
        self.rows = Some(file.into());
        self
    }

    /// Packs texts before they are tokenised: their lengths in tokens are estimated from their bytes,
    /// by a look at some 2,000 of them. So the first step needs no pass over the data. Rows have
    /// more padding, and tokens past the end of a row are cut: use it with
    /// [`cut`](Self::cut). No effect where lengths are known.
    pub fn estimated(mut self) -> Self {
        self.estimated = true;
        self
    }

    /// Sets the padding token, and the padding element of fields [`beside`](Self::beside). Default:
    /// 0.
    pub fn padding(mut self, token: i64) -> Self {
        self.padding = token;
        self
    }

    /// Sets the padding of one field, such as -100 for labels.
    pub fn padding_of(mut self, field: &str, element: i64) -> Self {
        self.paddings.push((field.into(), element));
        self
    }

    /// Opens the table of bins in the file `index`. The first call packs all documents to make it,
    /// on all cores ([`Packed::built`] reports this). The file takes some 5 bytes per document.
    /// Make the file before many processes open it.
    ///
    /// Errors: [`ErrorKind::Config`] for an unknown field, for a field that does not have one
    /// dimension or is stored in frames or chunks (then use
    /// [`copied`](crate::dataset::DatasetExt::copied)), for impossible bin sizes, and for an
    /// `index` that is another kind of file; [`ErrorKind::Shape`] for a document that is longer
    /// than a bin, unless it is split, cut or concatenated, and for fields of different lengths;
    /// [`ErrorKind::Changed`] for bins or rows of another dataset or of other settings;
    /// [`ErrorKind::Empty`] if there are no tokens; file system errors.
    pub fn open(self, index: impl AsRef<Path>) -> Result<Packed<D>> {
        unordered(&self.inner, "pack its sources, then mix them")?;
        let (fields, mut size) = self.checked()?;
        let place = index.as_ref();
        let access = self.access(&fields, place)?;
        if let Access::Estimated(estimate) = access {
            size.room -= estimate.margin as u32;
        }
        let paddings = self.paddings(&fields)?;
        let padding: Box<[Box<[u8]>]> = fields
            .fields
            .iter()
            .zip(&paddings)
            .map(|(field, element)| padding_row(*element, field, self.room))
            .collect::<Result<_>>()?;
        let key = self.key.unwrap_or(0);
        let by_key = self.key.is_some().into();
        let numbers = fields.numbers.iter().map(|number| *number as u64);
        let settings = [
            numbers.clone().next().unwrap_or(0),
            self.room as u64,
            self.long as u64,
            size.most.into(),
            by_key,
            key,
        ];
        let digest = kept::identity_of("packed", &self.inner).words(&settings);
        // Bins of one field keep the identity that they had before several fields were supported.
        let digest = numbers.skip(1).fold(digest, Digest::word);
        let digest = match access {
            Access::Estimated(estimate) => digest.words(&estimate.words()),
            _ => digest,
        };
        let order = self
            .key
            .map(|key| Permutation::new(self.inner.len(), Key::new(key).named("packed")));
        let own = fields
            .fields
            .iter()
            .map(|field| Field::fixed(field.name(), field.dtype(), [self.room]));
        let schema = own
            .chain(made(self.room, size.most as usize))
            .map(EncodedField::raw)
            .collect();
        let documents = InnerDocuments {
            inner: self.inner,
            fields,
            size,
            long: self.long,
            access,
        };
        // Bins that an earlier run made do not show whether these documents can be packed.
        documents.part(0, None, 0, &mut Parts::new(), &mut Vec::new())?;
        if self.rows.as_deref() == Some(place) {
            let message = "bins and rows cannot share one file: name two";
            return Err(Error::new(ErrorKind::Config, Stage::Index, message).with_path(place));
        }
        let (file, origin) = kept::open_or_make(
            place,
            KIND,
            "bins",
            digest.end(),
            |file| table::fits(file, size),
            |out| pack(&documents, order.as_ref(), out, place),
        )?;
        let mut packed = Packed {
            schema,
            padding,
            counts: table::counts(&file)?,
            identity: paddings
                .iter()
                .fold(digest, |digest, element| {
                    digest.word(element.cast_unsigned())
                })
                .end(),
            file,
            origin,
            recent: Recent::new(RECENT),
            sources: documents.inner.sources().clone(),
            rows: None,
            documents,
            room: self.room,
            opened: None,
            cut: AtomicU64::new(0),
        };
        if access != Access::Stored {
            packed.opened = Some(packed.opened_rows()?);
        }
        self.rows.map_or(Ok(()), |rows| packed.take_rows(rows))?;
        Ok(packed)
    }

    /// Checks the settings; returns the fields of the documents, and the size of a bin.
    fn checked(&self) -> Result<(TokenFields, Bin)> {
        let fields = TokenFields::of(self.inner.schema(), &self.fields)?;
        if let Some(field) = fields
            .fields
            .iter()
            .find(|field| MADE.contains(&field.name()))
        {
            return refused(format!(
                "field `{0}` has the name of the field {0} that packing adds: rename it",
                field.name()
            ));
        }
        if self.inner.chunked().is_some() {
            let message =
                "the samples are read in chunks, but packed documents are read one by one";
            return refused(format!("{message}{}", copied()));
        }
        if self.room == 0 || self.room > ROOM_MAX {
            return refused(format!(
                "bins of {} tokens; take 1 to {ROOM_MAX}",
                self.room
            ));
        }
        let most = self
            .documents_max
            .unwrap_or((self.room / 16).clamp(64, ITEMS_MAX));
        if most == 0 || most > ITEMS_MAX {
            return refused(format!("rows of {most} documents; take 1 to {ITEMS_MAX}"));
        }
        if self.inner.len() >= DOCUMENTS_MAX {
            let message = format!(
                "{} documents; fewer than {DOCUMENTS_MAX} can be packed",
                self.inner.len()
            );
            return Err(Error::new(ErrorKind::Limit, Stage::Index, message));
        }
        Ok((
            fields,
            Bin {
                room: self.room as u32,
                most: most as u32,
            },
        ))
    }

    /// How documents are read, and their lengths known.
    fn access(&self, fields: &TokenFields, place: &Path) -> Result<Access> {
        let (is_opened, known) = documents::opens(&self.inner, fields)?;
        match (is_opened, known, self.estimated) {
            (true, true, _) => Ok(Access::Opened),
            (true, false, true) if self.long != Long::Cut => {
                refused("estimated lengths are not exact: use them with cut")
            }
            (true, false, true) if self.rows.is_some() => {
                refused("rows are kept in a file only with known lengths")
            }
            (true, false, true) => {
                Estimate::of(&self.inner, fields, self.room, place).map(Access::Estimated)
            }
            _ => Ok(Access::Stored),
        }
    }

    /// The padding element of each field.
    fn paddings(&self, fields: &TokenFields) -> Result<Vec<i64>> {
        if let Some((name, _)) = self
            .paddings
            .iter()
            .find(|(name, _)| !fields.fields.iter().any(|field| field.name() == name))
        {
            let message = format!(
                "a padding for field `{name}`, which is not packed; packed fields: {}",
                self.fields.join(", ")
            );
            return Err(Error::new(ErrorKind::Config, Stage::Index, message));
        }
        Ok(fields
            .fields
            .iter()
            .map(|field| {
                let own = self
                    .paddings
                    .iter()
                    .rev()
                    .find(|(name, _)| name == field.name());
                own.map_or(self.padding, |(_, element)| *element)
            })
            .collect())
    }
}

/// The fields of a row that are made from its documents' lengths.
fn made(room: usize, most: usize) -> [Field; 4] {
    let [positions, documents, ends, longest] = MADE;
    [
        Field::fixed(positions, DType::I32, [room]),
        Field::fixed(documents, DType::I32, [room]),
        Field::fixed(ends, DType::I32, [most + 1]),
        Field::fixed(longest, DType::I32, []),
    ]
}

/// A row of padding.
fn padding_row(element: i64, field: &Field, room: usize) -> Result<Box<[u8]>> {
    macro_rules! integer {
        ($of:ty) => {
            <$of>::try_from(element)
                .ok()
                .map(|element| element.to_ne_bytes().repeat(room))
        };
    }
    let whole = element as f64;
    let is_exact = |found: f64| found == whole && found as i64 == element;
    macro_rules! float {
        ($of:expr, $back:expr) => {
            Some($of)
                .filter(|own| is_exact($back(*own)))
                .map(|own| own.to_ne_bytes().repeat(room))
        };
    }
    // Signed integers may also be given by their bits.
    let row = match field.dtype() {
        DType::U8 => integer!(u8),
        DType::I8 => integer!(i8).or(integer!(u8)),
        DType::U16 => integer!(u16),
        DType::I16 => integer!(i16).or(integer!(u16)),
        DType::U32 => integer!(u32),
        DType::I32 => integer!(i32).or(integer!(u32)),
        DType::U64 => integer!(u64),
        DType::I64 => Some(element.to_ne_bytes().repeat(room)),
        DType::Bool => (0..=1)
            .contains(&element)
            .then(|| vec![element as u8; room]),
        DType::F16 => float!(f16::from_f64(whole), f16::to_f64),
        DType::BF16 => float!(bf16::from_f64(whole), bf16::to_f64),
        DType::F32 => float!(whole as f32, f64::from),
        DType::F64 => float!(whole, std::convert::identity::<f64>),
        _ => None,
    };
    row.map(Vec::into_boxed_slice).ok_or_else(|| {
        let message = format!(
            "padding {element} of field `{}` does not fit {}",
            field.name(),
            field.dtype()
        );
        Error::new(ErrorKind::Config, Stage::Index, message)
    })
}

fn refused<T>(message: impl Into<String>) -> Result<T> {
    Err(Error::new(ErrorKind::Config, Stage::Index, message))
}

/// Packs all documents into the file.
fn pack<D: Dataset>(
    documents: &InnerDocuments<D>,
    order: Option<&Permutation>,
    out: &mut SideWriter,
    place: &Path,
) -> Result<()> {
    let failed = |error| Error::os(Stage::Index, "cannot write the bins", error).with_path(place);
    let len = documents.inner.len();
    let threads = std::thread::available_parallelism().map_or(2, usize::from);
    // A group has many bins, of which the last ones are not full.
    let step = u64::from(documents.size.room)
        .saturating_mul(16)
        .clamp(1 << 16, 1 << 19);
    let starts: Vec<u64> = (0..len.div_ceil(step)).map(|group| group * step).collect();
    // A bin that is filled in turn depends on the bins before it.
    let in_turn = Mutex::new(InTurn::default());
    let is_in_turn = documents.long == Long::Concatenate;
    let threads = if is_in_turn {
        1
    } else {
        threads.min(THREADS_MAX)
    };
    let mut writer = TableWriter::default();
    for some in starts.chunks(TOGETHER) {
        let groups = by_threads(threads, some, |_, start: &u64| {
            let positions = *start..(start + step).min(len);
            match is_in_turn {
                true => documents.concatenate(positions, order, &mut in_turn.hold()),
                false => documents.group(positions, order),
            }
        })?;
        for group in groups {
            writer.add(&group, out).map_err(failed)?;
        }
    }
    if writer.counts.bins == 0 {
        let message = format!("{len} documents without a token");
        return Err(Error::new(ErrorKind::Empty, Stage::Index, message));
    }
    let estimate = match documents.access {
        Access::Estimated(estimate) => Some(bytemuck::cast(estimate)),
        _ => None,
    };
    writer.finish(estimate, out).map_err(failed)
}

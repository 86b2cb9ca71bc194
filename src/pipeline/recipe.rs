//! How the parts of a sample become its row: which decoder fills which fields, then which
//! transforms run. Pure.

use crate::batch::KeptField;
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::setting::Setting;
use feedline_core::dataset::{Dataset, Sizes};
use feedline_core::decode::{Ctx, Decoder, Raw};
use feedline_core::memory::{BatchMut, Filled, Row};
use feedline_core::order::Draws;
use feedline_core::tensor::{DType, EncodedField, Encoding, Field, Packing, Shape, Spec};
use feedline_device::{DeviceOp, DirectStep, Finish, FinishStep, Gather};
use feedline_report::meter::Effort;
use std::ops::Range;
use std::sync::Arc;

pub(crate) type MapFn = dyn Fn(&mut Row<'_>, &mut Ctx<'_>) -> Result<()> + Send + Sync;
pub(crate) type MapBatchFn = dyn Fn(&mut BatchMut<'_>, &mut Ctx<'_>) -> Result<()> + Send + Sync;

/// The user's steps, in the order in which the builder was called.
#[derive(Clone, Default)]
pub(crate) struct Steps {
    /// `.decode(d)` (no name) and `.decode_field(name, d)`.
    pub(crate) decoders: Vec<(Option<String>, Arc<dyn Decoder>)>,
    pub(crate) maps: Vec<(Vec<Field>, Arc<MapFn>)>,
    pub(crate) map_batches: Vec<(Vec<Field>, Arc<MapBatchFn>)>,
    /// Whether the batch transforms hold a lock, so that only one thread at a time runs them.
    pub(crate) map_batch_in_turn: bool,
    pub(crate) keep: Option<Vec<String>>,
    /// `.ragged(name, batch_bytes)`.
    pub(crate) ragged: Vec<(String, Option<usize>)>,
    /// `.finish(name, f)`.
    pub(crate) finishes: Vec<(String, Finish)>,
}

/// How one field of the dataset gets into the row.
pub(crate) struct Handler {
    pub(crate) name: String,
    pub(crate) how: How,
    /// The fields that the handler fills.
    pub(crate) outputs: Range<usize>,
}

pub(crate) enum How {
    /// The stored bytes, of exactly this length, are the row. Storage may write them directly into
    /// the batch.
    InPlace(usize),
    /// Bytes are copied into the row.
    Copy,
    /// A decoder makes the row.
    Decode(Arc<dyn Decoder>),
    /// Storage writes bytes of exactly this length into device memory; the host never sees them.
    Direct,
    /// The field has no decoder and is not kept, and no transform sees it. It is not even read.
    Skip,
}

/// The checked recipe.
pub(crate) struct Recipe {
    pub(crate) spec: Spec,
    pub(crate) handlers: Vec<Handler>,
    pub(crate) maps: Vec<Arc<MapFn>>,
    pub(crate) map_batches: Vec<Arc<MapBatchFn>>,
    pub(crate) map_batch_in_turn: bool,
    /// Fields declared by `.map` and `.map_batch`. They are zeroed for each sample, because no
    /// other step writes them.
    pub(crate) added: Range<usize>,
    /// All fields: those of the slot, and those that only exist on a device (finished fields and
    /// staging areas).
    pub(crate) contents: Spec,
    /// The finishing steps on pictures.
    pub(crate) finishes: Vec<Finishing>,
    /// Whether the device runs the finishing steps.
    pub(crate) on_device: bool,
    /// Fields that storage writes into device memory.
    pub(crate) directs: Vec<DirectStep>,
    /// The delivered fields.
    pub(crate) keep: Vec<KeptField>,
    /// Packed fields: the field's number in the dataset, if the dataset's index has the lengths;
    /// and the field's number in the slot.
    pub(crate) packed: Vec<(Option<usize>, usize)>,
    /// Whether a decoder makes rows from pictures.
    pictures: bool,
}

/// What is known about the fields before their routes are chosen.
pub(crate) struct Draft<'a> {
    pub(crate) handlers: &'a [Handler],
    /// For each handler, whether its fields are delivered or used.
    pub(crate) wanted: Vec<bool>,
    /// Transforms on the host see the rows.
    pub(crate) transforms: bool,
}

/// A field of the dataset that is read directly.
pub(crate) struct DirectField {
    pub(crate) handler: usize,
    /// Rows are not whole pages of the file. They are read with the surrounding bytes, and moved on
    /// the device.
    pub(crate) unaligned: bool,
}

/// A drawn sample. Its random augmentations depend only on these values and the seed.
#[derive(Clone, Copy)]
pub(crate) struct Drawn {
    pub(crate) epoch: u64,
    pub(crate) id: u64,
    /// A number that distinguishes this draw of the sample from its other draws in the epoch.
    pub(crate) draw: u64,
}

/// The finishing step of one picture field.
pub(crate) struct Finishing {
    /// Shared with the device.
    pub(crate) step: Arc<FinishStep>,
    flip: f64,
    purpose: String,
}

impl Finishing {
    /// Whether this draw of a sample is mirrored.
    fn flipped(&self, seed: u64, drawn: Drawn) -> bool {
        let Drawn { epoch, id, draw } = drawn;
        self.flip > 0.0
            && Draws::of_draw(seed, epoch, id, draw, &self.purpose).next_f64() < self.flip
    }

    /// Finishes all rows of a full slot on the host. Blank rows stay blank.
    pub(crate) fn run_late(&self, slot: &mut Filled, seed: u64) {
        let epoch = slot.ticket().epoch;
        let rows = slot.rows();
        for row in 0..rows {
            let id = slot.ids()[row];
            if id == u64::MAX {
                continue;
            }
            let draw = slot.draw_of(row);
            let flip = self.flipped(seed, Drawn { epoch, id, draw });
            let (input, output) = slot.two_arrays(self.step.input, self.step.output);
            let from = self.step.plan.input_bytes();
            let to = self.step.plan.output_bytes();
            self.step.plan.run_row(
                &input[row * from..][..from],
                flip,
                &mut output[row * to..][..to],
            );
        }
    }

    /// Finishes a row on the host, or records for the device whether it is mirrored.
    pub(crate) fn run(&self, row: &mut Row<'_>, seed: u64, drawn: Drawn, on_device: bool) {
        let flip = self.flipped(seed, drawn);
        match self.step.flips.filter(|_| on_device) {
            Some(flips) => row.bytes_mut(flips).fill(u8::from(flip)),
            None if on_device => {}
            None => {
                let (input, output) = row.two_bytes(self.step.input, self.step.output);
                self.step.plan.run_row(input, flip, output);
            }
        }
    }
}

impl Recipe {
    /// Checks the steps against the dataset's schema. Errors: [`ErrorKind::Config`], with the names
    /// of fields.
    ///
    /// `direct` chooses the dataset's fields that are read directly into device memory.
    pub(crate) fn new(
        dataset: &dyn Dataset,
        steps: Steps,
        on_device: bool,
        direct: impl FnOnce(&Draft<'_>) -> Result<Vec<DirectField>>,
    ) -> Result<Self> {
        // Fields that no later step can see need not be made.
        let unseen = steps.maps.is_empty()
            && steps.map_batches.is_empty()
            && steps.finishes.is_empty()
            && steps.keep.as_ref().is_some_and(|keep| {
                !keep.is_empty()
                    && keep
                        .iter()
                        .all(|name| dataset.schema().iter().any(|field| field.name == *name))
            });
        let (mut handlers, mut fields) = handlers(
            dataset.schema(),
            steps.decoders,
            steps.keep.as_deref(),
            unseen,
        )?;
        let first_added = fields.len();
        let mut maps = Vec::new();
        let mut map_batches = Vec::new();
        for (added, map) in steps.maps {
            fields.extend(added);
            maps.push(map);
        }
        let last = fields.len();
        for (added, map) in steps.map_batches {
            fields.extend(added);
            map_batches.push(map);
        }
        let added = first_added..fields.len();
        pack(&steps.ragged, &mut fields, last)?;
        let packed = packed_fields(dataset, &handlers, &mut fields)?;
        let mut keep = every(&Spec::new(fields.clone())?);
        let transforms = !maps.is_empty() || !map_batches.is_empty();
        let draft = Draft {
            wanted: handlers
                .iter()
                .map(|handler| match &steps.keep {
                    Some(names) => fields[handler.outputs.clone()]
                        .iter()
                        .any(|field| names.iter().any(|name| name == field.name())),
                    None => true,
                })
                .collect(),
            handlers: &handlers,
            transforms,
        };
        let direct = direct(&draft)?;
        let (mut directs, staging) = direct_steps(direct, &mut handlers, &mut fields);
        let (finishes, made) = finishings(steps.finishes, &mut fields, &mut keep, on_device)?;
        let spec = Spec::new(fields.clone())?;
        fields.extend(made);
        for (gather, area) in directs
            .iter_mut()
            .filter_map(|step| step.gather.as_mut())
            .zip(staging)
        {
            gather.staging = fields.len();
            fields.push(area);
        }
        let contents = Spec::new(fields)?;
        let keep = match steps.keep {
            Some(names) => kept(&keep, &names)?,
            None => keep,
        };
        let pictures = handlers
            .iter()
            .zip(dataset.schema())
            .any(|(handler, field)| {
                matches!(handler.how, How::Decode(_)) && field.encoding.has_pictures()
            });
        Ok(Self {
            spec,
            handlers,
            maps,
            map_batches,
            map_batch_in_turn: steps.map_batch_in_turn,
            added,
            contents,
            finishes,
            on_device,
            directs,
            keep,
            packed,
            pictures,
        })
    }

    /// Whether the rows of a dataset field are packed by their lengths in the index.
    pub(crate) fn is_by_index(&self, field: usize) -> bool {
        self.packed.iter().any(|(number, _)| *number == Some(field))
    }

    /// Maximum number of parts of a sample.
    pub(crate) fn parts_max(&self, sizes: &Sizes) -> usize {
        self.handlers.len().saturating_add(sizes.appended_max)
    }

    /// Bytes that the decoders of one worker may use in addition to the row.
    pub(crate) fn scratch_bytes(&self) -> usize {
        // One decoder runs at a time, but each keeps memory for the next sample.
        self.handlers
            .iter()
            .map(|handler| handler.how.scratch_bytes())
            .fold(0, usize::saturating_add)
    }

    /// Fields of the slot that only the device's operations need. Delivered batches have no room
    /// for them.
    pub(crate) fn staged(&self) -> Vec<usize> {
        let inputs = self.finishes.iter().map(|finishing| finishing.step.input);
        inputs
            .filter(|field| self.directs.iter().all(|step| step.field != *field))
            .collect()
    }

    /// The device's work on a batch: the slot's fields to copy into the batch, then the operations.
    pub(crate) fn device_ops(&self) -> (Vec<usize>, Vec<DeviceOp>) {
        let staged = self.staged();
        let finishes = || self.finishes.iter().map(|finishing| &finishing.step);
        let made_of = finishes()
            .flat_map(|step| [Some(step.input), step.flips])
            .flatten();
        let offsets = self
            .directs
            .iter()
            .filter_map(|step| step.gather.map(|gather| gather.offsets));
        let mut copied: Vec<_> = self
            .keep
            .iter()
            .map(|kept| kept.index)
            .chain(made_of)
            .chain(offsets)
            .collect();
        copied.retain(|field| {
            *field < self.spec.fields().len()
                && self.directs.iter().all(|step| step.field != *field)
        });
        copied.retain(|field| !staged.contains(field));
        copied.sort_unstable();
        copied.dedup();
        let placed = self.directs.iter().cloned().map(DeviceOp::Place);
        let finished = finishes().cloned().map(DeviceOp::Finish);
        (copied, placed.chain(finished).collect())
    }

    /// The work for a row in addition to reading its bytes.
    pub(crate) fn effort(&self) -> Effort {
        let decodes = self
            .handlers
            .iter()
            .any(|handler| matches!(handler.how, How::Decode(_)));
        match self.all_in_place() && self.added.is_empty() && self.finishes.is_empty() {
            _ if decodes && self.pictures => Effort::Pictures,
            _ if decodes || !self.maps.is_empty() => Effort::Own,
            true => Effort::Copy,
            false => Effort::Light,
        }
    }

    /// Whether every stored field is read in place, so that no ring bytes are needed.
    pub(crate) fn all_in_place(&self) -> bool {
        self.handlers
            .iter()
            .all(|handler| matches!(handler.how, How::InPlace(_) | How::Direct | How::Skip))
    }

    /// Finishes a row whose other fields are final.
    pub(crate) fn finish(&self, row: &mut Row<'_>, seed: u64, drawn: Drawn) {
        for finishing in &self.finishes {
            finishing.run(row, seed, drawn, self.on_device);
        }
    }

    /// Whether any part of a row may be random.
    pub(crate) fn may_draw(&self) -> bool {
        let decodes = self
            .handlers
            .iter()
            .any(|handler| matches!(handler.how, How::Decode(_)));
        decodes || !self.maps.is_empty() || !self.finishes.is_empty()
    }

    /// Whether `.map_batch` may change pictures after their rows are full. Then the host finishes
    /// them after `.map_batch`.
    pub(crate) fn finishes_late(&self) -> bool {
        !self.on_device && !self.map_batches.is_empty() && !self.finishes.is_empty()
    }
}

impl How {
    fn scratch_bytes(&self) -> usize {
        match self {
            Self::Decode(decoder) => decoder.scratch_bytes(),
            Self::InPlace(_) | Self::Copy | Self::Direct | Self::Skip => 0,
        }
    }
}

/// How each field of the dataset gets into the row, and which fields it fills.
fn handlers(
    schema: &[EncodedField],
    asked: Vec<(Option<String>, Arc<dyn Decoder>)>,
    keep: Option<&[String]>,
    unseen: bool,
) -> Result<(Vec<Handler>, Vec<Field>)> {
    let mut decoders: Vec<Option<Arc<dyn Decoder>>> = vec![None; schema.len()];
    for (name, decoder) in asked {
        let index = which_field(schema, name.as_deref())?;
        if decoders[index].replace(decoder).is_some() {
            return bad(format!("field `{}` has two decoders", schema[index].name));
        }
    }
    let mut fields = Vec::new();
    let mut handlers = Vec::new();
    for (encoded, decoder) in schema.iter().zip(decoders) {
        let unwanted = keep.is_some_and(|keep| !keep.contains(&encoded.name));
        let outputs = match &decoder {
            Some(decoder) => decoder.outputs(encoded)?,
            None if unwanted && (encoded.as_raw().is_none() || unseen) => Vec::new(),
            None => Raw.outputs(encoded).map_err(|_| undecoded(encoded))?,
        };
        let start = fields.len();
        fields.extend(outputs);
        let how = match (decoder, &encoded.encoding) {
            (None, _) if fields.len() == start => How::Skip,
            (Some(decoder), _) => How::Decode(decoder),
            (
                None,
                Encoding::Raw {
                    shape: Shape::Fixed(_),
                    ..
                },
            ) => How::InPlace(fields[start].row_bytes()),
            (None, _) => How::Copy,
        };
        handlers.push(Handler {
            name: encoded.name.clone(),
            how,
            outputs: start..fields.len(),
        });
    }
    Ok((handlers, fields))
}

/// Packs the fields named in `ragged`, with the maximum bytes of a batch. Fields from `last` on are
/// added by `.map_batch`.
fn pack(ragged: &[(String, Option<usize>)], fields: &mut [Field], last: usize) -> Result<()> {
    for (name, batch_bytes) in ragged {
        let Some(number) = fields.iter().position(|field| field.name() == name) else {
            return no_field(Setting::Ragged, name, fields.iter());
        };
        let field = &mut fields[number];
        match batch_bytes {
            _ if !field.is_up_to() => {
                return bad(format!(
                    "field `{name}` has a fixed shape, so there is nothing to pack: leave it out \
                     of {}",
                    Setting::Ragged
                ));
            }
            Some(bytes) if *bytes < field.row_bytes() => {
                let most = field.row_bytes();
                return bad(format!(
                    "field `{name}`: the limit of {bytes} bytes per batch is less than the {most} \
                     of one row"
                ));
            }
            _ if number >= last => {}
            _ => field.set_packing(Packing {
                batch_bytes: *batch_bytes,
                by_index: batch_bytes.is_some(),
            }),
        }
    }
    match fields[last..]
        .iter()
        .find(|field| field.is_packed() || ragged.iter().any(|(name, _)| name == field.name()))
    {
        Some(field) => bad(format!(
            "a batch transform cannot add the packed field `{}`: rows are packed before it runs",
            field.name()
        )),
        None => Ok(()),
    }
}

/// The packed fields. Those with a byte limit must have their lengths in the dataset's index.
fn packed_fields(
    dataset: &dyn Dataset,
    handlers: &[Handler],
    fields: &mut [Field],
) -> Result<Vec<(Option<usize>, usize)>> {
    let mut packed = Vec::new();
    for (number, field) in fields.iter_mut().enumerate() {
        let Some(packing) = field.packing() else {
            continue;
        };
        let source = handlers
            .iter()
            .position(|handler| handler.outputs.contains(&number));
        let unknown = match source.map(|source| (source, &handlers[source])) {
            None => Some("a transform adds it"),
            Some((_, handler)) if handler.outputs.len() > 1 => {
                Some("its decoder also makes other fields")
            }
            Some((_, handler))
                if matches!(handler.how, How::Decode(_)) && field.dtype() != DType::U8 =>
            {
                Some("its decoder makes the lengths")
            }
            _ if dataset.chunked().is_some() => Some("it is stored in chunks"),
            Some((source, _)) if !feedline_core::dataset::knows_lengths(dataset, source) => {
                Some("the dataset's `field_bytes` gives no lengths for it")
            }
            Some(_) => None,
        };
        if let (Some(why), Some(_)) = (unknown, packing.batch_bytes) {
            return bad(format!(
                "the bytes per batch of field `{}` cannot be limited: {why}",
                field.name()
            ));
        }
        let by_index = packing.by_index && unknown.is_none();
        field.set_packing(Packing {
            by_index,
            ..packing
        });
        packed.push((source.filter(|_| by_index), number));
    }
    Ok(packed)
}

fn bad<T>(message: String) -> Result<T> {
    Err(Error::new(ErrorKind::Config, Stage::Build, message))
}

fn undecoded(encoded: &EncodedField) -> Error {
    let name = &encoded.name;
    let decoder = Setting::DecodeField.hint(|decode| format!(": {decode}"));
    let other = match encoded.encoding {
        Encoding::Image => ", for pictures of one size".into(),
        Encoding::List { .. } => Setting::Each.hint(|each| format!(" with {each} of an element's")),
        _ => "; or open the dataset with a maximum length for it".into(),
    };
    let without = Setting::Keep.hint(|keep| format!("; or leave it out: {keep}"));
    let message = format!(
        "field `{name}` is {} and needs a decoder{decoder}{other}{without}",
        encoded.encoding
    );
    Error::new(ErrorKind::Config, Stage::Build, message)
}

fn which_field(schema: &[EncodedField], name: Option<&str>) -> Result<usize> {
    let names = || {
        schema
            .iter()
            .map(|field| field.name.as_str())
            .collect::<Vec<_>>()
            .join(", ")
    };
    let Some(name) = name else {
        let those = |wanted: fn(&EncodedField) -> bool| -> Vec<usize> {
            (0..schema.len())
                .filter(|index| wanted(&schema[*index]))
                .collect()
        };
        let pictures = those(|field| field.encoding.has_pictures());
        let encoded = those(|field| field.as_raw().is_none());
        return match (&pictures[..], &encoded[..]) {
            ([index], _) | (_, [index]) => Ok(*index),
            (_, []) => bad(format!(
                "a decoder needs an encoded field; the dataset has only raw ones: {}",
                names()
            )),
            _ => {
                let names: Vec<&str> = encoded
                    .iter()
                    .map(|index| schema[*index].name.as_str())
                    .collect();
                bad(format!(
                    "which field to decode? Use {} with one of {}",
                    Setting::DecodeField,
                    names.join(", ")
                ))
            }
        };
    };
    match schema.iter().position(|field| field.name == name) {
        Some(index) => Ok(index),
        None => bad(feedline_core::dataset::no_field(schema, name)),
    }
}

/// All fields, unchanged.
fn every(spec: &Spec) -> Vec<KeptField> {
    spec.fields()
        .iter()
        .enumerate()
        .map(|(index, field)| KeptField {
            index,
            field: field.clone(),
        })
        .collect()
}

/// Marks the fields that are read directly. The slot gets their inputs; the staging areas are on
/// the device.
fn direct_steps(
    direct: Vec<DirectField>,
    handlers: &mut [Handler],
    slot: &mut Vec<Field>,
) -> (Vec<DirectStep>, Vec<Field>) {
    let mut steps = Vec::with_capacity(direct.len());
    let mut staging = Vec::new();
    for DirectField { handler, unaligned } in direct {
        let How::InPlace(row_bytes) = handlers[handler].how else {
            continue;
        };
        handlers[handler].how = How::Direct;
        let name = &handlers[handler].name;
        let field = handlers[handler].outputs.start;
        let gather = unaligned.then(|| {
            staging.push(Field::fixed(
                format!("{name} (staging)"),
                DType::U8,
                [DirectStep::stride(row_bytes)],
            ));
            slot.push(Field::fixed(format!("{name} (offsets)"), DType::U64, []));
            Gather {
                staging: 0,
                offsets: slot.len() - 1,
            }
        });
        steps.push(DirectStep {
            handler,
            field,
            row_bytes,
            gather,
        });
    }
    (steps, staging)
}

/// The finishing steps, and the fields that a device makes from the slot's fields. The slot gets
/// the inputs of the steps. The finished field is delivered under the name of its input.
fn finishings(
    steps: Vec<(String, Finish)>,
    slot: &mut Vec<Field>,
    keep: &mut [KeptField],
    on_device: bool,
) -> Result<(Vec<Finishing>, Vec<Field>)> {
    let mut finishings = Vec::with_capacity(steps.len());
    let mut made = Vec::new();
    for (name, finish) in steps {
        let Some(input) = keep.iter().position(|kept| kept.field.name() == name) else {
            return no_field(Setting::Finish, &name, keep.iter().map(|kept| &kept.field));
        };
        if finishings
            .iter()
            .any(|other: &(FinishStep, f64, String)| other.0.input == input)
        {
            return bad(format!("field `{name}` is finished twice"));
        }
        let field = finish.output(&slot[input])?;
        let plan = finish.plan(&slot[input])?;
        let flip = finish.flip;
        let flips = (on_device && flip > 0.0).then(|| {
            slot.push(Field::fixed(format!("{name} (mirrored)"), DType::U8, []));
            slot.len() - 1
        });
        keep[input] = KeptField {
            index: made.len(),
            field: field.clone(),
        };
        made.push(field.renamed(format!("{name} (finished)")));
        let purpose = format!("flip of {name}");
        finishings.push((
            FinishStep {
                plan,
                input,
                flips,
                output: made.len() - 1,
            },
            flip,
            purpose,
        ));
    }
    // The finished fields follow all fields that the slot has by now; on the host they are part of
    // the slot.
    for (step, ..) in &mut finishings {
        step.output += slot.len();
        keep[step.input].index = step.output;
    }
    if !on_device {
        slot.append(&mut made);
    }
    Ok((
        finishings
            .into_iter()
            .map(|(step, flip, purpose)| Finishing {
                step: Arc::new(step),
                flip,
                purpose,
            })
            .collect(),
        made,
    ))
}

fn no_field<'f, T>(
    setting: Setting,
    name: &str,
    all: impl Iterator<Item = &'f Field>,
) -> Result<T> {
    let there: Vec<_> = all.map(Field::name).collect();
    bad(format!(
        "{setting} names `{name}`, which is not a field of the batch; its fields are {}",
        there.join(", ")
    ))
}

fn kept(all: &[KeptField], names: &[String]) -> Result<Vec<KeptField>> {
    let mut keep: Vec<KeptField> = Vec::with_capacity(names.len());
    for name in names {
        match all.iter().find(|kept| kept.field.name() == name) {
            Some(kept) if !keep.contains(kept) => keep.push(kept.clone()),
            Some(_) => return bad(format!("{} names `{name}` twice", Setting::Keep)),
            None => return no_field(Setting::Keep, name, all.iter().map(|kept| &kept.field)),
        }
    }
    if keep.is_empty() {
        return bad(format!("{} keeps no field", Setting::Keep));
    }
    Ok(keep)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decode_picks_the_only_picture_or_the_only_encoded_field() {
        let raw = |name: &str| EncodedField::raw(Field::fixed(name, DType::U8, [2]));
        let image = EncodedField::image;
        let bytes = EncodedField::bytes;
        let cases: [(Vec<EncodedField>, std::result::Result<usize, &str>); 7] = [
            (vec![raw("label"), image("image")], Ok(1)),
            (vec![bytes("json"), raw("label"), image("image")], Ok(2)),
            (vec![raw("label"), bytes("json")], Ok(1)),
            (vec![raw("label")], Err("only raw ones: label")),
            (
                vec![raw("label"), image("a"), image("b")],
                Err("with one of a, b"),
            ),
            (
                vec![bytes("a"), raw("label"), bytes("b")],
                Err("with one of a, b"),
            ),
            (
                vec![bytes("c"), image("a"), image("b")],
                Err("with one of c, a, b"),
            ),
        ];
        for (schema, expected) in cases {
            match (which_field(&schema, None), expected) {
                (Ok(found), Ok(expected)) => assert_eq!(found, expected, "{schema:?}"),
                (Err(error), Err(words)) => assert!(error.to_string().ends_with(words), "{error}"),
                (found, _) => panic!("{found:?} for {schema:?}"),
            }
        }
    }
}

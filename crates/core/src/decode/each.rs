//! Lists: each element of a field goes through one decoder, into its place of the row.
//!
//! ```text
//! row of `images`: │ element 0 │ element 1 │ zeros │ …      len: 2
//!                    ▲ decoder   ▲ decoder                  (Row::element lends the place)
//! ```
//!
//! Limits: at most one output of the inner decoder may vary in length, such as a text; none may
//! depend on the batch's group. Invariants: an element's bytes go straight into the batch; all
//! elements of a row get the same draws.

use super::{Ctx, Decoder, Many};
use crate::memory::Row;
use crate::tensor::{DType, EncodedField, Encoding, Field, Shape};
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::setting::Setting;

/// Decodes every element of a list, such as the frames of a clip or the pictures of a document.
///
/// The field is a list of the dataset: [`EncodedField::images`] or [`EncodedField::list`], which
/// state the maximum number of elements. If the decoder makes rows of `[224, 224, 3]`, the field of
/// the batch has the shape `[max, 224, 224, 3]`. `FieldView::lens` has the numbers of elements, and
/// zeros pad shorter lists. A list with more elements than the maximum is an error of its sample
/// ([`ErrorKind::Shape`]), as is an element that cannot be decoded.
///
/// All elements of a sample get the same draws: frames of one size get one crop and one flip.
///
/// If the decoder's rows vary in length (`Bytes::up_to(64)` for texts), elements are padded, too:
/// the shape is `[max, 64]`, and the field `NAME.sizes` (`i64`) has the length of each element.
///
/// ```
/// # use feedline_core::decode::{Bytes, Each};
/// let captions = Each::new(Bytes::up_to(64));
/// ```
#[derive(Clone, Debug)]
pub struct Each<D> {
    decoder: D,
    /// Position of the output of varying length, if any.
    varying: Option<usize>,
}

impl<D: Decoder> Each<D> {
    /// Lets `decoder` decode each element.
    pub fn new(decoder: D) -> Self {
        let outputs = decoder
            .outputs(&EncodedField::image("element"))
            .or_else(|_| decoder.outputs(&EncodedField::bytes("element")));
        let varying = outputs
            .ok()
            .and_then(|fields| fields.iter().position(Field::is_up_to));
        Self { decoder, varying }
    }
}

/// An element as a field of its own.
fn element_of(name: &str, pictures: bool) -> EncodedField {
    if pictures {
        EncodedField::image(name)
    } else {
        EncodedField::bytes(name)
    }
}

fn refused<T>(message: String) -> Result<T> {
    Err(Error::new(ErrorKind::Config, Stage::Build, message))
}

impl<D: Decoder> Decoder for Each<D> {
    fn outputs(&self, input: &EncodedField) -> Result<Vec<Field>> {
        let name = &input.name;
        let Encoding::List { pictures, max } = input.encoding else {
            return refused(format!(
                "field `{name}` is {}, not a list: leave out {}",
                input.encoding,
                Setting::Each
            ));
        };
        if max == 0 {
            return refused(format!(
                "field `{name}` as a list: the maximum is 0, but it must be at least 1"
            ));
        }
        let inner = self.decoder.outputs(&element_of(name, pictures))?;
        let mut fields = Vec::with_capacity(inner.len() + 1);
        for (position, field) in inner.iter().enumerate() {
            let varies = field.is_up_to() && self.varying != Some(position);
            if varies || field.is_packed() || field.varies_by_group() {
                return refused(format!(
                    "field `{name}` is a list: each element needs one size, but `{}` varies",
                    field.name()
                ));
            }
            fields.push(Field::rows_up_to(
                field.name(),
                field.dtype(),
                max,
                field.dims(),
            ));
        }
        if self.varying.is_some() {
            fields.push(Field::up_to(format!("{name}.sizes"), DType::I64, max));
        }
        Ok(fields)
    }

    fn scratch_bytes(&self) -> usize {
        self.decoder.scratch_bytes()
    }

    fn decode(&self, input: &[u8], ctx: &mut Ctx<'_>, out: &mut Row<'_>) -> Result<()> {
        let many = Many::parse(input)?;
        let fields = ctx.fields();
        let len = many.len();
        let first = &out.spec().fields()[fields.start];
        if let Shape::UpTo { max, .. } = first.shape()
            && len > *max
        {
            let name = first.name();
            let more = Setting::Elements.hint(|elements| format!(" (raise it with {elements})"));
            let message = format!("list `{name}` has {len} elements, the limit is {max}{more}");
            return Err(Error::new(ErrorKind::Shape, Stage::Decode, message));
        }
        for field in fields.clone() {
            out.set_len(field, len)?;
        }
        let sizes = fields.end - 1;
        let varying = self
            .varying
            .map(|position| (fields.start + position, sizes));
        for (index, bytes) in many.iter().enumerate() {
            self.decoder
                .decode(bytes, ctx, &mut out.element(index, varying))
                .map_err(|error| error.within(format_args!("element {index}")))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decode::{Bytes, Single};

    /// Two bytes: the row's own number as drawn, and the first byte of the element.
    struct Drawn;

    impl Decoder for Drawn {
        fn outputs(&self, input: &EncodedField) -> Result<Vec<Field>> {
            Ok(vec![Field::fixed(&input.name, DType::U8, [2])])
        }

        fn decode(&self, input: &[u8], ctx: &mut Ctx<'_>, out: &mut Row<'_>) -> Result<()> {
            let drawn = ctx.draws("test").below(250) as u8 + 1;
            let first = input.first().ok_or_else(|| Error::decode("no bytes"))?;
            out.copy_from(ctx.fields().start, &[drawn, *first])
        }
    }

    fn framed(elements: &[&[u8]]) -> Vec<u8> {
        let mut framed = Vec::new();
        Many::write(elements, &mut framed).unwrap();
        framed
    }

    #[test]
    fn every_element_gets_its_place_and_the_same_draws() {
        let mut single = Single::new(Each::new(Drawn), &EncodedField::images("clip", 3)).unwrap();
        assert_eq!(single.fields()[0].dims(), [3, 2]);
        for (id, elements) in [(7, &[&b"a"[..], b"b", b"c"][..]), (8, &[b"d"]), (9, &[])] {
            single.decode(&framed(elements), 1, 0, id).unwrap();
            let drawn = Ctx::new(1, 0, id, 0..1, &mut Default::default())
                .draws("test")
                .below(250) as u8
                + 1;
            let mut expected: Vec<u8> = elements
                .iter()
                .flat_map(|element| [drawn, element[0]])
                .collect();
            expected.resize(6, 0);
            assert_eq!(single.bytes(0), expected);
            assert_eq!(single.len_of(0), Some(elements.len()));
        }
    }

    #[test]
    fn texts_have_their_sizes_beside_them() {
        let each = Each::new(Bytes::up_to(4));
        let mut single = Single::new(each, &EncodedField::list("words", 3)).unwrap();
        single
            .decode(&framed(&[b"long", b"xyz", b"w"]), 0, 0, 0)
            .unwrap();
        single.decode(&framed(&[b"", b"abc"]), 0, 0, 0).unwrap();
        assert_eq!(single.bytes(0), b"\0\0\0\0abc\0\0\0\0\0");
        let sizes: Vec<u8> = [0_i64, 3, 0]
            .iter()
            .flat_map(|size| size.to_ne_bytes())
            .collect();
        assert_eq!(single.bytes(1), sizes);
        assert_eq!(single.fields()[1].name(), "words.sizes");
    }

    #[test]
    fn a_list_that_does_not_fit_is_refused_by_name() {
        let list = || EncodedField::list("words", 2);
        let mut single = Single::new(Each::new(Bytes::up_to(4)), &list()).unwrap();
        for (input, message) in [
            (
                framed(&[b"a", b"b", b"c"]),
                "list `words` has 3 elements, the limit is 2",
            ),
            (
                framed(&[b"a", b"longer"]),
                "element 1: field `words` takes at most 4, the sample has 6",
            ),
            (
                framed(&[b"a"])[..7].to_vec(),
                "a list's head is cut at 7 bytes",
            ),
        ] {
            let error = single.decode(&input, 0, 0, 0).unwrap_err();
            assert!(error.to_string().contains(message), "{error}");
        }
        let refusals = [
            (
                Each::new(Bytes::up_to(4)).outputs(&EncodedField::bytes("words")),
                "not a list",
            ),
            (
                Each::new(Bytes::packed(4)).outputs(&list()),
                "`words` varies",
            ),
            (
                Each::new(Bytes::up_to(4)).outputs(&EncodedField::list("words", 0)),
                "maximum is 0",
            ),
            (
                Bytes::up_to(4).outputs(&list()),
                "is a list of up to 2 byte strings",
            ),
        ];
        for (refused, message) in refusals {
            let error = refused.unwrap_err();
            assert!(error.to_string().contains(message), "{error}");
        }
    }
}

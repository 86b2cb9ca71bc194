//! Sizes of all pictures, made by one pass over the data and kept in a side file.
//!
//! The file has one section: width and height of each sample's picture, 4 bytes each, from the
//! picture's header. Invariants: those of `feedline_core::dataset::kept`. A picture with a damaged header has 1 × 1
//! pixels; the loader reports it.

use crate::dataset::wrap::pass::pass;
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_core::dataset::{Dataset, kept, no_field};
use feedline_core::storage::sidefile::SideKind;
use feedline_core::tensor::Encoding;
use feedline_image::Image;
use std::path::Path;

const KIND: SideKind = SideKind {
    name: *b"dims",
    version: 1,
    older: b"",
};
const SIZES: usize = 0;
const DAMAGED: (u32, u32) = (1, 1);

/// Errors: [`ErrorKind::Config`] for an unknown field, or one without pictures; reading errors;
/// errors of the side file.
pub(crate) fn picture_sizes(
    dataset: &dyn Dataset,
    name: &str,
    image: &Image,
    place: &Path,
) -> Result<Vec<(u32, u32)>> {
    let schema = dataset.schema();
    let refused = |message| Err(Error::new(ErrorKind::Config, Stage::Index, message));
    let Some(number) = schema.iter().position(|known| known.name == name) else {
        return refused(no_field(schema, name));
    };
    if schema[number].encoding != Encoding::Image {
        return refused(format!(
            "field `{name}` is {}; only pictures have sizes",
            schema[number].encoding
        ));
    }
    let identity = kept::identity_of("sizes", dataset)
        .words(&[number as u64, image.turns().into()])
        .end();
    let (file, _) = kept::open_or_make(
        place,
        KIND,
        "sizes of pictures",
        identity,
        |file| file.len(SIZES) == 8 * dataset.len(),
        |out| {
            pass(
                dataset,
                "sizes",
                |rows, all| {
                    let mut sizes = vec![DAMAGED; rows];
                    all(&mut |row, field, bytes| {
                        if field == number {
                            sizes[row] = image.size_of(bytes).unwrap_or(DAMAGED);
                        }
                    })?;
                    Ok(sizes.into_iter().map(<[u32; 2]>::from).collect::<Vec<_>>())
                },
                |sizes| {
                    out.put(bytemuck::cast_slice(&sizes)).map_err(|error| {
                        Error::os(Stage::Index, "cannot write the sizes", error).with_path(place)
                    })
                },
            )?;
            out.end_section();
            Ok(())
        },
    )?;
    let mut sizes = vec![[0_u32; 2]; dataset.len() as usize];
    file.fill(SIZES, 0, bytemuck::cast_slice_mut(&mut sizes))?;
    Ok(sizes.into_iter().map(Into::into).collect())
}

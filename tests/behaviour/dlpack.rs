//! Batches exported as DLPack: the consumer's view of the data, and the reuse of the memory.

#![allow(unsafe_code)]

use crate::common::noise;
use feedline::dataset::{Records, Tokens};
use feedline::dlpack::{DLDevice, DLManagedTensorVersioned, Dlpack, Tensors};
use feedline::tensor::{DType, Element, Field};
use feedline::unstable::DLTensor;
use feedline::{ErrorKind, LastBatch, Loader, Order};
use std::collections::VecDeque;
use std::ptr::NonNull;
use std::time::Duration;

/// A consumer: reads and writes only through the C struct's addresses, and calls its deleter on
/// drop.
struct Consumer(NonNull<DLManagedTensorVersioned>);

// SAFETY: the protocol allows any thread.
unsafe impl Send for Consumer {}

impl Consumer {
    fn tensor(&self) -> &DLTensor {
        // SAFETY: alive until the deleter is called by `drop`.
        unsafe { &self.0.as_ref().dl_tensor }
    }

    fn shape(&self) -> Vec<i64> {
        // SAFETY: `ndim` sizes, alive as above.
        unsafe { std::slice::from_raw_parts(self.tensor().shape, self.tensor().ndim as usize) }
            .to_vec()
    }

    fn values<T: Element>(&mut self) -> &mut [T] {
        assert_eq!(self.tensor().dtype, T::DTYPE.into());
        bytemuck::cast_slice_mut(self.bytes())
    }

    fn bytes(&mut self) -> &mut [u8] {
        let tensor = self.tensor();
        let len = self.shape().iter().product::<i64>() as usize;
        let len = len * usize::from(tensor.dtype.bits) / 8;
        // SAFETY: as many initialised bytes as stated, without another owner.
        unsafe { std::slice::from_raw_parts_mut(tensor.data.cast(), len) }
    }
}

impl From<Dlpack> for Consumer {
    fn from(dlpack: Dlpack) -> Self {
        Self(dlpack.into_versioned())
    }
}

impl Drop for Consumer {
    fn drop(&mut self) {
        // SAFETY: the struct is ours, and this is the only call.
        unsafe { (self.0.as_ref().deleter.unwrap())(self.0.as_ptr()) }
    }
}

fn field(tensors: Tensors) -> Consumer {
    tensors.fields.into_iter().next().unwrap().1.into()
}

/// An endless run over two slots of 4 records of 8 bytes.
fn two_slots(deadline: Duration) -> (Loader, Vec<u8>) {
    let bytes = noise(8 * 64, 1);
    let records = Records::builder(8).open_bytes(bytes.clone()).unwrap();
    (
        Loader::builder(records)
            .batch_size(4)
            .tuning(|t| t.slots(2).held_deadline(deadline))
            .build()
            .unwrap(),
        bytes,
    )
}

#[test]
fn the_last_tensor_of_a_batch_frees_its_slot() {
    let (loader, bytes) = two_slots(Duration::from_millis(200));
    let mut epoch = loader.epochs(0..).unwrap();
    let first = epoch.next().unwrap().unwrap().into_dlpack();
    let second = epoch.next().unwrap().unwrap();
    let held = |epoch: &mut feedline::Epoch| {
        epoch.next().unwrap().unwrap_err().kind() == ErrorKind::BatchesHeld
    };
    assert!(held(&mut epoch));
    let Tensors {
        fields,
        ids,
        status,
        ..
    } = first;
    // One field is exported in both ways, one is never exported.
    drop(status);
    assert!(held(&mut epoch));
    let legacy = ids.into_legacy();
    // SAFETY: the struct is ours, and this is the only call.
    unsafe { (legacy.as_ref().deleter.unwrap())(legacy.as_ptr()) };
    assert!(held(&mut epoch));
    let mut last: Consumer = fields.into_iter().next().unwrap().1.into();
    assert!(held(&mut epoch));
    assert_eq!(last.values::<u8>(), &bytes[..32]);
    std::thread::spawn(move || drop(last)).join().unwrap();
    let third = epoch.next().unwrap().unwrap();
    assert_eq!(
        third.field("record").unwrap().as_bytes().unwrap(),
        &bytes[64..96]
    );
    drop(second);
}

#[test]
fn dropping_the_last_tensor_wakes_a_waiting_next() {
    let (loader, bytes) = two_slots(Duration::from_secs(600));
    let mut epoch = loader.epochs(0..).unwrap();
    let mut next = move || field(epoch.next().unwrap().unwrap().into_dlpack());
    let mut held: VecDeque<_> = [next(), next()].into();
    for number in 2..200_usize {
        let oldest = held.pop_front();
        let thread = std::thread::spawn(move || drop(oldest));
        let mut seen = next();
        thread.join().unwrap();
        assert_eq!(
            seen.bytes(),
            &bytes[number % 16 * 32..][..32],
            "batch {number}"
        );
        held.push_back(seen);
    }
}

/// 64 samples: eight bytes of their id, the id as label, a field that no transform writes, and a
/// field with (id mod 5) copies of the id. Blank rows fill up the last batch.
fn of_ids() -> Loader {
    let bytes: Vec<u8> = (0..64_u8).flat_map(|id| [id; 8]).collect();
    let records = Records::builder(8)
        .classes((0..64).collect())
        .open_bytes(bytes)
        .unwrap();
    let more = [
        Field::fixed("zero", DType::F32, [3]),
        Field::up_to("some", DType::U16, 4),
    ];
    let builder = Loader::builder(records)
        .map_adding(more, |row, ctx| {
            let field = row.index_of("some")?;
            let len = ctx.id() as usize % 5;
            row.slice_mut::<u16>(field)?[..len].fill(ctx.id() as u16);
            row.set_len(field, len)
        })
        .order(Order::shuffled(1));
    builder
        .batch_size(5)
        .last_batch(LastBatch::Mask)
        .tuning(|t| t.slots(2))
        .build()
        .unwrap()
}

/// Record, label, zero, some, lengths of some, ids, status.
fn all(tensors: Tensors) -> Vec<Consumer> {
    let Tensors {
        fields,
        lens,
        ids,
        status,
        ..
    } = tensors;
    let names = |list: &[(String, Dlpack)]| {
        list.iter()
            .map(|(name, _)| name.clone())
            .collect::<Vec<_>>()
    };
    assert_eq!(
        (names(&fields), names(&lens)),
        (
            ["record", "label", "zero", "some"]
                .map(String::from)
                .to_vec(),
            vec!["some".into()]
        )
    );
    fields
        .into_iter()
        .chain(lens)
        .map(|(_, tensor)| tensor)
        .chain([ids, status])
        .map(Consumer::from)
        .collect()
}

#[test]
fn writes_into_an_array_do_not_reach_later_batches() {
    for batch in of_ids().epochs(0..3).unwrap() {
        let batch = batch.unwrap();
        let ids = batch.ids().to_vec();
        let valid = batch.valid();
        let mut all = all(batch.into_dlpack());
        let shapes: Vec<_> = all.iter().map(Consumer::shape).collect();
        assert_eq!(
            shapes,
            [
                vec![5, 8],
                vec![5],
                vec![5, 3],
                vec![5, 4],
                vec![5],
                vec![5],
                vec![5]
            ]
        );
        assert_eq!(*all[5].values::<u64>(), ids);
        assert_eq!(
            *all[6].values::<u8>(),
            [0, 1, 2, 3, 4].map(|row| u8::from(row >= valid))
        );
        for (row, id) in ids.into_iter().enumerate() {
            let blank = id == u64::MAX;
            let (value, len) = if blank { (0, 0) } else { (id, id as usize % 5) };
            let some: Vec<u16> = (0..4)
                .map(|at| if at < len { value as u16 } else { 0 })
                .collect();
            assert_eq!(all[0].values::<u8>()[row * 8..][..8], [value as u8; 8]);
            assert_eq!(all[1].values::<i64>()[row], value as i64);
            assert_eq!(all[2].values::<f32>()[row * 3..][..3], [0.0; 3]);
            assert_eq!(all[3].values::<u16>()[row * 4..][..4], some);
            assert_eq!(all[4].values::<u64>()[row], len as u64);
        }
        all.iter_mut().for_each(|tensor| tensor.bytes().fill(0xaa));
    }
}

#[test]
fn a_write_into_a_tensor_shows_in_no_other_tensor() {
    let mut all = all(of_ids()
        .epoch(0)
        .unwrap()
        .next()
        .unwrap()
        .unwrap()
        .into_dlpack());
    for index in 0..all.len() {
        let mut before: Vec<_> = all
            .iter_mut()
            .map(|tensor| tensor.bytes().to_vec())
            .collect();
        all[index].bytes().fill(0xbb);
        before[index].fill(0xbb);
        assert_eq!(
            all.iter_mut()
                .map(|tensor| tensor.bytes().to_vec())
                .collect::<Vec<_>>(),
            before
        );
    }
}

#[test]
fn tensors_outlive_their_loader() {
    let tokens: Vec<u8> = noise(2 * 96, 3);
    let dataset = Tokens::builder(DType::U16)
        .window(16)
        .open_bytes(tokens.clone())
        .unwrap();
    let loader = Loader::builder(dataset).batch_size(4).build().unwrap();
    let batches: Vec<_> = loader
        .epoch(0)
        .unwrap()
        .map(|batch| batch.unwrap().into_dlpack())
        .collect();
    drop(loader);
    assert_eq!(batches.len(), 2);
    for (number, batch) in batches.into_iter().enumerate() {
        let mut seen = field(batch);
        assert_eq!(
            (seen.tensor().device, seen.tensor().data.addr() % 256),
            (DLDevice::CPU, 0)
        );
        assert_eq!(seen.shape(), if number == 0 { [4, 16] } else { [2, 16] });
        let rest = &tokens[number * 4 * 32..];
        assert_eq!(*seen.bytes(), rest[..rest.len().min(4 * 32)]);
    }
}

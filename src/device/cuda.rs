//! NVIDIA GPUs through CUDA's driver API.
//!
//! ```text
//! full slot ──(transfer thread: one copy per run of arrays)──► copy stream ──event "copied"──► Batch
//!    │                                                            ▲                              │ bound streams wait for
//!    └── free when its copy has ended                             │                              ▼ "copied", never the CPU
//!                                       waits for ◄── events "released", one per bound stream, recorded when it is dropped
//! ```
//!
//! The driver library is loaded at run time. Without it, or without a device,
//! [`Device::auto`](super::Device::auto) returns the host and gives the reason. The build needs no
//! part of CUDA: the crate has its own table of symbols.
//!
//! Invariants:
//! * `build` reserves device memory once; a batch reserves nothing.
//! * A slot belongs to the copy until the copy's event is reached. A buffer belongs to the consumer
//!   until the events recorded at the batch's drop are reached. The copy stream waits for these
//!   events; no thread does.
//! * No thread waits in the driver for the device, except at shutdown.
//!
//! # CUDA graphs
//!
//! A loader may be built, run and dropped while another thread captures a graph, in any mode: the
//! loader's calls use the relaxed mode, or are among the few that captures allow, so they neither
//! end the capture nor fail. If the consumer's stream itself is capturing:
//!
//! * Receive and bind batches before or after the capture. [`Batch::bind`](crate::Batch::bind),
//!   reading a field, and `next()` of a loader with that stream fail with [`ErrorKind::Config`](crate::ErrorKind::Config);
//!   nothing is lost, and the capture continues.
//! * A graph must not work on a batch, because the memory holds another batch when the graph runs.
//!   Copy the batch to the graph's own memory between runs.
//! * A batch may be dropped during the capture. Its memory is reused after the capture, when the
//!   loader has waited once for the whole context. A capture that begins at that very moment may
//!   end with error 901. A bare handle ([`Stream::from_raw`], DLPack) may be invalid after the
//!   capture, so the loader waits for the whole context at once, which ends a capture (error 901):
//!   drop such a batch before or after the capture.
//!
//! # Onto the GPU
//!
//! Declare only the stream that works on the batches. The stream waits for the copy of each batch,
//! and the memory of a dropped batch is reused only after the stream's work. The CPU waits for
//! neither. [`Finish`](super::Finish) converts to floats after the copy.
//!
//! ## cudarc: kernels of your own
//!
//! With the feature `cudarc`, `Device::cuda_in` takes your context,
//! [`LoaderBuilder::stream`](crate::LoaderBuilder::stream) takes your stream, and
//! `FieldView::cuda_slice` returns a field as a `CudaSlice`.
//!
//! cudarc builds bindings for one version of CUDA. Your program chooses it; this crate does not.
//! Depend on cudarc yourself, or set `CUDARC_CUDA_VERSION=12080` in the environment of the build:
//!
//! ```toml
//! feedline = { version = "0.1", features = ["cudarc"] }
//! cudarc = { version = "0.19", default-features = false, features = ["std", "driver", "cuda-12080"] }
//! ```
//!
//! Bindings of an older version run on newer drivers. `cuda-version-from-build-system` asks `nvcc`,
//! and fails the build for a version unknown to cudarc.
//!
//! ```no_run
//! use feedline::device::cuda::cudarc::driver::{CudaFunction, CudaStream, LaunchConfig, PushKernelArg};
//! use feedline::device::{Device, Finish};
//! use feedline::tensor::DType;
//! use feedline::{Loader, Order, dataset, decode};
//! use std::sync::Arc;
//!
//! /// `step` is a kernel `(const float* images, const long long* labels, unsigned rows)` in the stream's context.
//! fn train(stream: &Arc<CudaStream>, step: &CudaFunction) -> Result<(), Box<dyn std::error::Error>> {
//!     let floats = Finish::to(DType::F32).mean_std(&[0.485, 0.456, 0.406], &[0.229, 0.224, 0.225]).channels_first();
//!     let loader = Loader::builder(dataset::Images::open("train/")?)
//!         .decode(decode::Image::random_resized_crop(224))
//!         .finish("image", floats)
//!         .order(Order::shuffled(42))
//!         .batch_size(256)
//!         .device(Device::cuda_in(stream.context().clone())?)
//!         .stream(stream)
//!         .build()?;
//!     for batch in loader.epoch(0)? {
//!         let batch = batch?;
//!         let images = batch.field("image")?.cuda_slice::<f32>(stream)?; // [256, 3, 224, 224], dense
//!         let labels = batch.field("label")?.cuda_slice::<i64>(stream)?;
//!         let rows = batch.len() as u32;
//!         let mut launch = stream.launch_builder(step);
//!         launch.arg(&*images).arg(&*labels).arg(&rows);
//!         unsafe { launch.launch(LaunchConfig::for_num_elems(rows)) }?;
//!     } // the batch may be dropped while the kernel is still queued
//!     Ok(())
//! }
//! ```
//!
//! ## candle
//!
//! A candle tensor owns and frees its memory, so it cannot borrow a batch: it gets a copy, made on
//! the GPU at memory speed. This example is not compiled here, since candle's feature `cuda` needs
//! nvcc. It was type-checked against candle-core 0.9.2 and 0.11.1, which share this crate's version
//! of cudarc and so its types.
//!
//! ```ignore
//! use candle_core::{CudaStorage, Storage, Tensor, op::BackpropOp};
//!
//! let device = candle_core::Device::new_cuda_with_stream(0)?;
//! let candle = device.as_cuda_device()?;
//! let stream = candle.cuda_stream(); // all of candle's work is on it
//! let loader = Loader::builder(dataset)
//!     .device(feedline::Device::cuda_in(stream.context().clone())?)
//!     .stream(&stream)
//!     .build()?;
//! for batch in loader.epoch(0)? {
//!     let batch = batch?;
//!     let field = batch.field("x")?;
//!     let own = stream.clone_dtod(&*field.cuda_slice::<f32>(&stream)?)?;
//!     let storage = Storage::Cuda(CudaStorage::wrap_cuda_slice(own, candle.clone()));
//!     let x = Tensor::from_storage(storage, field.shape(), BackpropOp::none(), false);
//! }
//! ```
//!
//! ## burn
//!
//! burn's CUDA backend imports no memory and exposes no stream, only the address of its own memory,
//! so the example copies each batch into an empty tensor. Two waits on the CPU replace the missing
//! ordering of the streams. This example is not compiled here, because burn is not a dependency of
//! this crate. It was type-checked against burn 0.22.1 (features `cuda`, `extension`, without
//! `fusion`, with which a tensor has no address) and cubecl 0.11.3.
//!
//! ```ignore
//! use burn::tensor::{Device, Tensor};
//! use burn_cubecl::Cube;
//! use cubecl::cuda::CudaRuntime;
//! use cubecl_runtime::runtime::Runtime;
//! use feedline::device::cuda::cudarc::driver::{CudaContext, result};
//!
//! let stream = CudaContext::new(0)?.new_stream()?; // in the primary context, which cubecl uses as well
//! let loader = Loader::builder(dataset)
//!     .device(feedline::Device::cuda_in(stream.context().clone())?)
//!     .stream(&stream)
//!     .build()?;
//! for batch in loader.epoch(0)? {
//!     let batch = batch?;
//!     let field = batch.field("x")?; // f32 [rows, 1024]
//!     let values: usize = field.shape().iter().product();
//!     // One dimension: rows of other tensors may be padded.
//!     let empty = Tensor::<1>::empty([values], &Device::cuda(0)).try_into_primitive::<Cube>().expect("a tensor of CUDA");
//!     let memory = empty.client.get_resource::<<CudaRuntime as Runtime>::Server>(empty.handle.clone())?;
//!     cubecl::future::block_on(empty.client.sync())?; // earlier users of this memory have finished
//!     let to = memory.resource().ptr;
//!     let from = field.device_ptr()?;
//!     unsafe { result::memcpy_dtod_async(to, from, field.size_bytes(), stream.cu_stream()) }?;
//!     stream.synchronize()?;
//!     let x: Tensor<2> = Tensor::<1>::from_primitive::<Cube>(empty).reshape([batch.len(), 1024]);
//! }
//! ```
//!
//! ## PyTorch, JAX, CuPy: DLPack
//!
//! [`Batch::into_dlpack`](crate::Batch::into_dlpack) hands over the memory without a copy. The
//! memory returns to the loader when the last tensor is freed. JAX passes a stream on which it does
//! not compute: bind its compute stream as well, as the package in `python` does. From
//! Rust:
//!
//! ```no_run
//! use feedline::dlpack::DLManagedTensorVersioned;
//! use std::ptr::NonNull;
//!
//! /// The contents of the capsule "dltensor_versioned" that `tensor.__dlpack__(stream=stream)` returns.
//! ///
//! /// # Safety
//! /// The stream must live, on the device of the batch, until every tensor of the batch is freed.
//! unsafe fn export(batch: feedline::Batch, stream: usize) -> feedline::Result<Vec<(String, NonNull<DLManagedTensorVersioned>)>> {
//!     let export = |(name, tensor): (String, feedline::dlpack::Dlpack)| {
//!         unsafe { tensor.bind(stream) }?;
//!         Ok((name, tensor.into_versioned()))
//!     };
//!     batch.into_dlpack().fields.into_iter().map(export).collect()
//! }
//! ```
//!
//! From Python, with the package in `python`, which wraps this and a loader:
//!
//! ```python
//! import feedline.torch as fl
//!
//! loader = fl.images("train/", size=224, batch_size=256, shuffle=42, device="cuda", dtype="f16", normalize=fl.IMAGENET)
//! for images, labels in loader:
//!     loss = model(images)  # float16 [256, 3, 224, 224], ordered with PyTorch's current stream
//! ```

#[doc(no_inline)]
pub use feedline_device::Stream;
#[cfg(feature = "cudarc")]
#[doc(inline)]
pub use feedline_device::cuda::FieldSlice;
#[cfg(feature = "cudarc")]
#[doc(no_inline)]
pub use feedline_device::cuda::cudarc;
#[doc(inline)]
pub use feedline_device::cuda::end_calls;

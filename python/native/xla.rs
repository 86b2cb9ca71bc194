//! The stream on which JAX works, told by a handler of XLA's FFI: the one that JAX names to
//! `__dlpack__` is another.
//!
//! ```text
//! jit of feedline_stream(device=n) ──► XLA calls `told` as it enqueues ──XLA_FFI_Stream_Get──► STREAMS[n] ──► _xla_stream(n)
//! ```
//!
//! The layouts are those of `xla/ffi/api/c_api.h`, up to the last member that is read here. Each
//! struct says its size, which is checked before a member is read that an older XLA may not have.

#![allow(unsafe_code)]

use pyo3::prelude::*;
use pyo3::types::PyCapsule;
use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::{offset_of, size_of};
use std::ptr::{self, NonNull};
use std::sync::{Mutex, PoisonError};

/// Version of the API: that of the caller, else the one that XLA had when it did not yet say it.
const VERSION: (c_int, c_int) = (0, 1);
const METADATA: c_int = 1;
const EXECUTE: c_int = 3;
const SCALAR: c_int = 3;
const S64: c_int = 5;
const FAILED_PRECONDITION: c_int = 9;
/// The name that XLA's own examples give such capsules.
const CAPSULE: &CStr = c"xla._CUSTOM_CALL_TARGET";

/// The stream of each device, by JAX's number of it.
static STREAMS: Mutex<BTreeMap<i64, usize>> = Mutex::new(BTreeMap::new());

/// `XLA_FFI_Error`, which XLA makes and frees.
#[repr(C)]
struct Error(c_void);

/// `XLA_FFI_Extension_Base`.
#[repr(C)]
struct Extension {
    struct_size: usize,
    kind: c_int,
    next: *mut Extension,
}

/// `XLA_FFI_Api_Version`.
#[repr(C)]
struct Version {
    struct_size: usize,
    extensions: *mut Extension,
    major: c_int,
    minor: c_int,
}

/// `XLA_FFI_Metadata`.
#[repr(C)]
struct Metadata {
    struct_size: usize,
    version: Version,
    traits: u32,
}

/// `XLA_FFI_Metadata_Extension`.
#[repr(C)]
struct MetadataExtension {
    base: Extension,
    metadata: *mut Metadata,
}

/// `XLA_FFI_Error_Create_Args`.
#[repr(C)]
struct ErrorArgs {
    struct_size: usize,
    extensions: *mut Extension,
    message: *const c_char,
    code: c_int,
}

/// `XLA_FFI_Stream_Get_Args`.
#[repr(C)]
struct StreamArgs {
    struct_size: usize,
    extensions: *mut Extension,
    context: *mut c_void,
    stream: *mut c_void,
}

/// `XLA_FFI_Api`.
#[repr(C)]
struct Api {
    struct_size: usize,
    extensions: *mut Extension,
    version: Version,
    internal: *const c_void,
    error_create: Option<unsafe extern "C" fn(*mut ErrorArgs) -> *mut Error>,
    error_message: *const c_void,
    error_destroy: *const c_void,
    register: *const c_void,
    stream_get: Option<unsafe extern "C" fn(*mut StreamArgs) -> *mut Error>,
}

/// `XLA_FFI_Args` and `XLA_FFI_Rets`.
#[repr(C)]
struct Buffers {
    struct_size: usize,
    extensions: *mut Extension,
    size: i64,
    types: *const c_int,
    buffers: *const *const c_void,
}

/// `XLA_FFI_ByteSpan`.
#[repr(C)]
struct Span {
    start: *const u8,
    len: usize,
}

/// `XLA_FFI_Scalar`.
#[repr(C)]
struct Scalar {
    dtype: c_int,
    value: *const c_void,
}

/// `XLA_FFI_Attrs`.
#[repr(C)]
struct Attributes {
    struct_size: usize,
    extensions: *mut Extension,
    size: i64,
    types: *const c_int,
    names: *const *const Span,
    values: *const *const c_void,
}

/// `XLA_FFI_CallFrame`.
#[repr(C)]
struct Frame {
    struct_size: usize,
    extensions: *mut Extension,
    api: *const Api,
    context: *mut c_void,
    stage: c_int,
    arguments: Buffers,
    results: Buffers,
    attributes: Attributes,
}

/// The handler, for `jax.ffi.register_ffi_target`.
#[pyfunction(name = "_xla_handler")]
pub fn handler(py: Python<'_>) -> PyResult<Bound<'_, PyCapsule>> {
    let handler = NonNull::new(told as *mut c_void).expect("a function has an address");
    // SAFETY: a function lives as long as the process.
    unsafe { PyCapsule::new_with_pointer(py, handler, CAPSULE) }
}

/// The stream that XLA told of a device, once the handler has run there.
#[pyfunction(name = "_xla_stream")]
pub fn stream(device: i64) -> Option<usize> {
    STREAMS
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .get(&device)
        .copied()
}

/// `XLA_FFI_Handler`: null, or an error that XLA frees.
unsafe extern "C" fn told(frame: *mut Frame) -> *mut Error {
    // SAFETY: XLA gives a frame, whose members before the last one every version has.
    let (api, extensions, size) =
        unsafe { ((*frame).api, (*frame).extensions, (*frame).struct_size) };
    // SAFETY: null, or XLA's functions, of the size that they say.
    let api = unsafe { api.as_ref() }.filter(|api| api.struct_size >= size_of::<Api>());
    // SAFETY: the extensions of the frame.
    if let Some(metadata) = unsafe { metadata(extensions) } {
        let (major, minor) = api.map_or(VERSION, |api| (api.version.major, api.version.minor));
        metadata.version.major = major;
        metadata.version.minor = minor;
        metadata.traits = 0;
        return ptr::null_mut();
    }
    // Without them not even an error can be made: who asks finds no stream.
    let Some(api) = api else {
        return ptr::null_mut();
    };
    if size < size_of::<Frame>() {
        return refused(
            api,
            c"feedline: the frame of this call is that of an older XLA",
        );
    }
    // SAFETY: as large as it was just found to be.
    let frame = unsafe { &*frame };
    // SAFETY: the attributes of the frame.
    let Some(device) = (unsafe { device(&frame.attributes) }) else {
        return refused(
            api,
            c"feedline: the call has no attribute `device` of 64 bits",
        );
    };
    let (Some(get), EXECUTE) = (api.stream_get, frame.stage) else {
        return ptr::null_mut();
    };
    let mut args = StreamArgs {
        struct_size: size_of::<StreamArgs>(),
        extensions: ptr::null_mut(),
        context: frame.context,
        stream: ptr::null_mut(),
    };
    // SAFETY: XLA's function, with the arguments that it asks for.
    let error = unsafe { get(&raw mut args) };
    if !error.is_null() {
        return error;
    }
    if args.stream.is_null() {
        return refused(api, c"feedline: XLA names no stream");
    }
    STREAMS
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .insert(device, args.stream.addr());
    ptr::null_mut()
}

/// What XLA asks of a handler before its first call. The caller promises the extensions of a frame.
unsafe fn metadata<'a>(mut extension: *mut Extension) -> Option<&'a mut Metadata> {
    // SAFETY: a list that ends with null.
    while let Some(base) = unsafe { extension.as_ref() } {
        if base.kind == METADATA && base.struct_size >= size_of::<MetadataExtension>() {
            // SAFETY: its kind and size say so; XLA waits for the answer in it.
            let metadata = unsafe { (*extension.cast::<MetadataExtension>()).metadata.as_mut() };
            return metadata.filter(|metadata| {
                metadata.struct_size >= offset_of!(Metadata, traits) + size_of::<u32>()
            });
        }
        extension = base.next;
    }
    None
}

/// The attribute `device`. The caller promises the attributes of a frame.
unsafe fn device(attributes: &Attributes) -> Option<i64> {
    let of = |index: usize| {
        // SAFETY: the three arrays have `size` entries; a name is a span of bytes, a scalar's value
        // is of its type.
        unsafe {
            let name = &**attributes.names.add(index);
            let name = std::slice::from_raw_parts(name.start, name.len);
            if name != b"device" || *attributes.types.add(index) != SCALAR {
                return None;
            }
            let scalar = &*(*attributes.values.add(index)).cast::<Scalar>();
            (scalar.dtype == S64).then(|| scalar.value.cast::<i64>().read())
        }
    };
    (0..usize::try_from(attributes.size).unwrap_or(0)).find_map(of)
}

/// An error of XLA's with these words.
fn refused(api: &Api, message: &CStr) -> *mut Error {
    let mut args = ErrorArgs {
        struct_size: offset_of!(ErrorArgs, code) + size_of::<c_int>(),
        extensions: ptr::null_mut(),
        message: message.as_ptr(),
        code: FAILED_PRECONDITION,
    };
    // SAFETY: XLA's function, with the arguments that it asks for; it copies the message.
    api.error_create
        .map_or(ptr::null_mut(), |create| unsafe { create(&raw mut args) })
}

//! The stand-in GPU itself: that it is late where a GPU is late, and finds what a GPU would get wrong silently.

#![cfg(feature = "cuda")]
#![allow(unsafe_code)]

#[path = "common/standin.rs"]
mod standin;

use cudarc::driver::CudaContext;
use standin::{Config, Live, cuda};

#[test]
fn the_safe_api_of_cudarc_runs_on_it() {
    let session = cuda().session(Config::default());
    let context = CudaContext::new(0).unwrap();
    let stream = context.new_stream().unwrap();
    let there = stream.clone_htod(&[1u32, 2, 3]).unwrap();
    let back = stream.clone_dtoh(&there).unwrap();
    assert_eq!(back, [1, 2, 3]);
    drop((there, stream, context));
    println!("{}", session.trace());
    assert_eq!(session.live(), Live::default());
}

//! A saved state: any bytes at all are a state or an error, never a panic; a state is written as it
//! was read.
//!
//! `cargo +nightly fuzz run state tests/fixtures/state`
#![no_main]

use feedline::State;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Ok(state) = State::from_bytes(bytes) {
        assert_eq!(State::from_bytes(&state.to_bytes()).unwrap(), state);
        State::agree(&[state.clone(), state]).unwrap();
    }
});

//! The tables of the local cache stay within the plan, for any number of objects.

use super::allocations::heap;
use crate::common::server::Server;
use crate::common::*;
use feedline::dataset::{Dataset, Records};
use feedline::memory::MemoryTerm;
use feedline::storage::Cache;
use feedline::{Loader, Order};
use std::io::{BufRead, BufReader, Read};
use std::ops::ControlFlow;
use std::process::{Child, Stdio};

const OBJECTS: usize = 10_000;
const RECORD: usize = 64;

/// A server in another process, so that its heap is not counted; it ends with its standard input.
/// Gives its URL.
fn server() -> (Child, String) {
    let mut command = process(&beside!("a_server_of_small_objects"), "serve");
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap())
        .lines()
        .map(Result::unwrap);
    let url = lines.find_map(|line| {
        line.split_once("http://")
            .map(|(_, place)| format!("http://{place}"))
    });
    (child, url.unwrap())
}

#[test]
#[ignore = "a part of another test, which starts it as a process of its own"]
fn a_server_of_small_objects() {
    let server = Server::new();
    (0..OBJECTS).for_each(|number| {
        server.put(
            &format!("bucket/{number:05}.bin"),
            noise(RECORD, number as u64),
        )
    });
    println!("{}", server.http(""));
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
}

#[test]
fn tables_of_small_cached_objects_stay_within_the_plan() {
    if !alone(&here!()) {
        return;
    }
    let dir = Dir::in_memory(1 << 30);
    let (mut child, url) = server();
    let records = Records::builder(RECORD)
        .open(format!("{url}{{00000..{:05}}}.bin", OBJECTS - 1))
        .unwrap();
    let cache = Cache::at(dir.path("cache")).block_bytes(4096);
    let warmed = cache
        .warm(records.sources(), |_| ControlFlow::Continue(()))
        .unwrap();
    assert_eq!(warmed.missing(), 0, "{:?}", warmed.errors.first());
    let before = heap();
    let builder = Loader::builder(records)
        .order(Order::shuffled(1))
        .batch_size(100)
        .workers(1)
        .tuning(|t| t.slots(2).depth(1));
    let loader = build(builder.cache(cache));
    // What warming held may be freed meanwhile.
    let built = heap().saturating_sub(before);
    assert_eq!(pull(&loader, 0).unwrap().len(), OBJECTS);
    let more = heap().saturating_sub(before);
    let plan = loader.plan();
    let terms = [MemoryTerm::NETWORK, MemoryTerm::TABLES, MemoryTerm::CACHED];
    let planned = terms
        .iter()
        .map(|term| plan.term(*term).bytes())
        .sum::<usize>();
    println!(
        "{OBJECTS} objects: {built} bytes built, {more} after an epoch; {planned} planned\n{plan}"
    );
    assert!(
        more <= planned,
        "{more} bytes on the heap, {planned} planned:\n{plan}"
    );
    child.kill().unwrap();
    child.wait().unwrap();
}

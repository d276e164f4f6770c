//! Eight threads that repeatedly use maps, strings and channels on calmalloc.
//!
//! Each thread's work is a function of a seed, and is repeated by the main thread alone: a block with two
//! owners, or with lost contents, changes the result. Messages are created by one thread and dropped by
//! another. Prints one figure per line, and fails with a message if a result is wrong or calmalloc did not
//! serve the program.
//!
//!     churn [ROUNDS]

use std::collections::{BTreeMap, HashMap};
use std::hash::Hasher;
use std::process::ExitCode;
use std::sync::mpsc;
use std::{env, thread};

#[global_allocator]
static ALLOCATOR: calmalloc::CalMalloc = calmalloc::CalMalloc;

const THREADS: u64 = 8;
const STEPS: u64 = 20_000;
const MESSAGES: u64 = 2_000;
const MIB: u64 = 1 << 20;

/// Numbers that look random (xorshift64).
struct Random(u64);

impl Random {
    fn new(seed: u64) -> Self {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    fn below(&mut self, most: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % most
    }
}

/// The same in every process, unlike a map's hashes (FNV-1a).
struct Digest(u64);

impl Hasher for Digest {
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

fn string(random: &mut Random) -> String {
    let longest = if random.below(50) == 0 { 100_000 } else { 200 };
    let length = random.below(longest);
    let first = random.below(26);
    (0..length).map(|i| char::from(b'a' + ((first + i) % 26) as u8)).collect()
}

/// A thread's work on its own maps.
fn churn(seed: u64) -> u64 {
    let mut random = Random::new(seed);
    let mut hashed: HashMap<u64, String> = HashMap::new();
    let mut ordered: BTreeMap<String, Vec<u64>> = BTreeMap::new();
    let mut digest = Digest(seed);
    for _ in 0..STEPS {
        let key = random.below(1_000);
        match random.below(6) {
            0 | 1 => {
                hashed.insert(key, string(&mut random));
            }
            2 => {
                if let Some(text) = hashed.remove(&key) {
                    digest.write(text.as_bytes());
                }
            }
            3 => ordered.entry(format!("key {key}")).or_default().extend(0..random.below(500)),
            4 => {
                if let Some(numbers) = ordered.remove(&format!("key {key}")) {
                    digest.write_u64(numbers.iter().sum());
                }
            }
            _ => {
                if let Some(text) = hashed.get_mut(&key) {
                    text.push_str("and more, which makes the block grow");
                }
            }
        }
    }
    let mut left: Vec<_> = hashed.into_iter().collect();
    left.sort();
    for (key, text) in left {
        digest.write_u64(key);
        digest.write(text.as_bytes());
    }
    for (text, numbers) in ordered {
        digest.write(text.as_bytes());
        digest.write_usize(numbers.len());
    }
    digest.finish()
}

fn message(sender: u64, number: u64) -> String {
    string(&mut Random::new(sender * MESSAGES + number + 1))
}

/// One round: threads that churn, and send each other messages, and end. The number of wrong results.
fn round(expected: &[u64]) -> u64 {
    let (senders, receivers): (Vec<_>, Vec<_>) =
        (0..THREADS).map(|_| mpsc::sync_channel::<(u64, String)>(64)).unzip();
    let threads: Vec<_> = receivers
        .into_iter()
        .zip(0..THREADS)
        .map(|(receiver, me)| {
            let next = senders[((me + 1) % THREADS) as usize].clone();
            thread::spawn(move || {
                let sender = thread::spawn(move || {
                    for number in 0..MESSAGES {
                        next.send((number, message(me, number))).expect("the receiver is there");
                    }
                });
                let result = churn(me);
                let before = (me + THREADS - 1) % THREADS;
                let received: Vec<_> = receiver.iter().take(MESSAGES as usize).collect();
                sender.join().expect("the sender ends well");
                let right =
                    received.iter().filter(|(number, text)| *text == message(before, *number)).count();
                (result, MESSAGES - right as u64)
            })
        })
        .collect();
    drop(senders);
    let results = threads.into_iter().map(|thread| thread.join().expect("the thread ends well"));
    results.zip(expected).map(|((result, wrong), expected)| wrong + u64::from(result != *expected)).sum()
}

fn run(rounds: u64) -> Result<(), String> {
    let start = calmalloc::stats();
    let expected: Vec<u64> = (0..THREADS).map(churn).collect();
    let mut wrong = 0;
    for _ in 0..rounds {
        wrong += round(&expected);
    }
    let held = vec![1u8; 64 * MIB as usize];
    let grown = calmalloc::stats();
    // SAFETY: the block is the vector's, and lives on.
    let usable = unsafe { calmalloc::usable_size(held.as_ptr()) };
    let sum: u64 = held.iter().map(|byte| u64::from(*byte)).sum();
    drop(held);
    let given_back = calmalloc::trim(0);
    let end = calmalloc::stats();

    println!("rounds {rounds}");
    println!("wrong {wrong}");
    println!("cache_misses {}", grown.cache_misses - start.cache_misses);
    println!("large_allocations {}", grown.large_allocations - start.large_allocations);
    println!("in_use_with_vector {}", grown.in_use);
    println!("in_use_at_end {}", end.in_use);
    println!("dirty_at_end {}", end.dirty);
    println!("given_back {given_back}");

    let claims = [
        (wrong == 0, "results are wrong"),
        (sum == 64 * MIB, "a block lost its bytes"),
        (usable as u64 >= 64 * MIB, "a block of Rust's is not calmalloc's"),
        (grown.cache_misses > start.cache_misses, "no small block was calmalloc's"),
        (grown.large_allocations > start.large_allocations, "no large block was calmalloc's"),
        (grown.in_use >= end.in_use + 64 * MIB, "the counters do not know of a block of 64 MiB"),
        (end.in_use < 4 * MIB, "threads that ended left memory in use"),
        (end.purged > start.purged, "nothing was purged"),
    ];
    match claims.iter().find(|(holds, _)| !holds) {
        Some((_, failure)) => Err((*failure).to_string()),
        None => Ok(()),
    }
}

fn main() -> ExitCode {
    let rounds = match env::args().nth(1).map(|word| word.parse()) {
        None => 3,
        Some(Ok(rounds)) if rounds > 0 => rounds,
        Some(_) => {
            eprintln!("churn: ROUNDS is a number from 1 on");
            return ExitCode::from(2);
        }
    };
    match run(rounds) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("churn: {failure}");
            ExitCode::FAILURE
        }
    }
}

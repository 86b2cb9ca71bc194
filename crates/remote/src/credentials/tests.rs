//! Renewals of credentials against a source that follows orders, without a store.

use super::*;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Gives the number of the question as credentials.
#[derive(Default)]
struct Orders {
    asked: AtomicUsize,
    asked_anew: AtomicUsize,
    /// Answers wait until this is off.
    closed: AtomicBool,
    fails: AtomicBool,
    panics: AtomicBool,
    life: Option<(Duration, Duration)>,
    /// Renewals that work at once.
    good: usize,
}

struct Scripted(Arc<Orders>);

#[async_trait]
impl Source<usize> for Scripted {
    async fn get(&self, anew: bool) -> Result<Fresh<usize>> {
        let number = self.0.asked.fetch_add(1, Ordering::SeqCst) + 1;
        self.0
            .asked_anew
            .fetch_add(usize::from(anew), Ordering::SeqCst);
        if number <= self.0.good {
            return Ok(Fresh {
                value: Arc::new(number),
                life: self.0.life,
            });
        }
        while self.0.closed.load(Ordering::SeqCst) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert!(!self.0.panics.load(Ordering::SeqCst), "do-not-show-me");
        match self.0.fails.load(Ordering::SeqCst) {
            true => Err(refused("the command of profile x failed")),
            false => Ok(Fresh {
                value: Arc::new(number),
                life: self.0.life,
            }),
        }
    }
}

fn scripted(life: Option<(Duration, Duration)>) -> (Arc<Orders>, Credentials<usize>) {
    let orders = Arc::new(Orders {
        life,
        ..Orders::default()
    });
    (orders.clone(), Credentials::new(Scripted(orders)))
}

/// The first renewal works at once, whatever is ordered.
fn scripted_after_one(life: Option<(Duration, Duration)>) -> (Arc<Orders>, Credentials<usize>) {
    let orders = Arc::new(Orders {
        life,
        good: 1,
        ..Orders::default()
    });
    (orders.clone(), Credentials::new(Scripted(orders)))
}

fn run<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_time()
        .build()
        .unwrap()
        .block_on(future)
}

async fn pause() {
    tokio::time::sleep(Duration::from_millis(2)).await;
}

const LONG: Duration = Duration::from_secs(600);

#[test]
fn requests_share_one_renewal() {
    run(async {
        let (orders, credentials) = scripted(None);
        orders.closed.store(true, Ordering::SeqCst);
        let request = || {
            tokio::spawn({
                let credentials = credentials.clone();
                async move { *credentials.get().await.unwrap().0 }
            })
        };
        let requests: Vec<_> = (0..100).map(|_| request()).collect();
        pause().await;
        orders.closed.store(false, Ordering::SeqCst);
        for request in requests {
            assert_eq!(request.await.unwrap(), 1);
        }
        assert_eq!(orders.asked.load(Ordering::SeqCst), 1);
    });
}

#[test]
fn a_renewal_ahead_of_the_end_holds_up_nobody() {
    run(async {
        let (orders, credentials) = scripted_after_one(Some((LONG, Duration::ZERO)));
        orders.closed.store(true, Ordering::SeqCst);
        for _ in 0..100 {
            assert_eq!(
                *credentials.get().await.unwrap().0,
                1,
                "the old ones while the renewal runs"
            );
        }
        while orders.asked.load(Ordering::SeqCst) < 2 {
            pause().await;
        }
        orders.closed.store(false, Ordering::SeqCst);
        while *credentials.get().await.unwrap().0 == 1 {
            pause().await;
        }
    });
}

#[test]
fn a_failed_renewal_keeps_the_old_credentials_until_they_end() {
    run(async {
        let life = Duration::from_millis(800);
        let (orders, credentials) = scripted_after_one(Some((life, Duration::ZERO)));
        orders.fails.store(true, Ordering::SeqCst);
        let start = Instant::now();
        let error = loop {
            match credentials.get().await {
                Ok((value, _)) => assert_eq!(*value, 1),
                Err(error) => break error,
            }
            pause().await;
        };
        assert!(start.elapsed() >= life, "{:?}", start.elapsed());
        assert!(
            error.kind() == ErrorKind::Permission && error.to_string().contains("profile x failed"),
            "{error}"
        );
        // The pause is a quarter of the time that is left, so failures come seldom until the end is
        // near.
        let asked = orders.asked.load(Ordering::SeqCst);
        assert!((2..100).contains(&asked), "{asked}");
        orders.fails.store(false, Ordering::SeqCst);
        assert!(credentials.get().await.is_ok());
    });
}

#[test]
fn expired_credentials_are_renewed_once_for_all_requests() {
    run(async {
        let (orders, credentials) = scripted(None);
        let (_, number) = credentials.get().await.unwrap();
        // Without the store's word, young credentials stay.
        credentials.refuse(number, false);
        assert_eq!(*credentials.get().await.unwrap().0, 1);
        for _ in 0..10 {
            credentials.refuse(number, true);
            assert_eq!(*credentials.get().await.unwrap().0, 2);
        }
        assert_eq!(
            (
                orders.asked.load(Ordering::SeqCst),
                orders.asked_anew.load(Ordering::SeqCst)
            ),
            (2, 1)
        );
        // A renewal that fails is tried anew by the next request.
        let (_, number) = credentials.get().await.unwrap();
        orders.fails.store(true, Ordering::SeqCst);
        credentials.refuse(number, true);
        assert!(credentials.get().await.is_err());
        orders.fails.store(false, Ordering::SeqCst);
        assert_eq!(*credentials.get().await.unwrap().0, 4);
        assert_eq!(orders.asked_anew.load(Ordering::SeqCst), 3);
    });
}

#[test]
fn a_cancelled_request_does_not_end_the_renewal() {
    run(async {
        let (orders, credentials) = scripted(None);
        orders.closed.store(true, Ordering::SeqCst);
        assert!(
            tokio::time::timeout(Duration::from_millis(10), credentials.get())
                .await
                .is_err()
        );
        orders.closed.store(false, Ordering::SeqCst);
        assert_eq!(*credentials.get().await.unwrap().0, 1);
        assert_eq!(orders.asked.load(Ordering::SeqCst), 1);
    });
}

#[test]
fn a_panic_of_a_source_is_an_error() {
    run(async {
        let (orders, credentials) = scripted(None);
        orders.panics.store(true, Ordering::SeqCst);
        let error = credentials.get().await.unwrap_err();
        assert!(
            error.kind() == ErrorKind::Panicked && !error.to_string().contains("do-not-show-me"),
            "{error}"
        );
        orders.panics.store(false, Ordering::SeqCst);
        assert!(credentials.get().await.is_ok());
    });
}

#[test]
fn credentials_are_due_ten_minutes_ahead_or_after_half_of_a_short_life() {
    let due = |seconds| {
        Fresh::new((), Some(Duration::from_secs(seconds)))
            .life
            .unwrap()
            .1
            .as_secs()
    };
    assert_eq!(
        [due(3600), due(1300), due(900), due(60)],
        [3000, 700, 450, 30]
    );
}

/// A provider as of the client library.
#[derive(Debug)]
struct Provider(usize);

#[async_trait]
impl CredentialProvider for Provider {
    type Credential = usize;

    async fn get_credential(&self) -> object_store::Result<Arc<usize>> {
        if self.0 == 3 {
            let source =
                "Server returned non-2xx status code: 403 Forbidden: you sent do-not-show-me"
                    .into();
            return Err(object_store::Error::Generic {
                store: "S3",
                source,
            });
        }
        Ok(Arc::new(self.0))
    }
}

#[test]
fn the_provider_of_the_library_is_kept_until_the_store_refuses() {
    run(async {
        let made = AtomicUsize::new(0);
        let source = Library::<usize>::new(move || {
            Ok(Arc::new(Provider(made.fetch_add(1, Ordering::SeqCst) + 1)) as _)
        })
        .unwrap();
        for (anew, value) in [(false, 1), (false, 1), (true, 2), (false, 2)] {
            assert_eq!(*source.get(anew).await.unwrap().value, value);
        }
        let said = source.get(true).await.err().unwrap().to_string();
        assert!(
            said.contains("403 Forbidden; the guide") && !said.contains("do-not-show-me"),
            "{said}"
        );
    });
}

#[test]
fn no_debug_text_shows_credentials() {
    let credentials = scripted(None).1;
    assert_eq!(format!("{credentials:?}"), "Credentials");
}

//! Ranks on threads, over the loopback.

use std::net::TcpListener;
use std::sync::atomic::{AtomicBool, Ordering};

use super::*;
use crate::device::{CudaDevice, DeviceOptions};

/// Places of the ranks of a job of its own.
fn place(world: u32) -> impl Fn(u32) -> Job {
    let port = TcpListener::bind("127.0.0.1:0").expect("binds").local_addr().expect("address").port();
    move |rank| Job {
        rank,
        world,
        local_rank: rank,
        address: "127.0.0.1".to_owned(),
        port,
        secret: b"a secret of tests".to_vec(),
    }
}

/// Runs a program on every rank of a job of its own.
fn run<T: Send>(world: u32, program: impl Fn(u32, Link) -> T + Sync) -> Vec<T> {
    let job = place(world);
    let program = &program;
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..world)
            .map(|rank| {
                let job = job(rank);
                scope.spawn(move || {
                    program(rank, Link::connect(&job, Duration::from_secs(20)).expect("connects"))
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().expect("no panic")).collect()
    })
}

const LONG: Duration = Duration::from_secs(20);

fn join(link: &Link, name: &str, ranks: &[u32]) -> u64 {
    match link.join(name, ranks, LONG) {
        Answer::Joined(group) => group,
        _ => panic!("{name} does not form"),
    }
}

#[test]
fn members_gather_in_group_order_round_by_round() {
    run(4, |rank, link| {
        let (name, ranks): (_, &[u32]) = if rank == 3 { ("one", &[3]) } else { ("three", &[2, 0, 1]) };
        let group = join(&link, name, ranks);
        for round in 0..20u8 {
            let given = vec![rank as u8; usize::from(round)];
            let Answer::Gathered(all) = link.gather(group, &given, LONG) else { panic!("gathers") };
            let want: &[u8] = if rank == 3 { &[3] } else { &[2, 0, 1] };
            let want: Vec<_> = want.iter().map(|r| vec![*r; usize::from(round)]).collect();
            assert_eq!(all, want);
        }
        link.leave(LONG);
    });
}

#[test]
fn more_silent_strangers_than_are_heard_at_once_do_not_keep_ranks_from_meeting() {
    let job = place(2);
    std::thread::scope(|scope| {
        let first = scope.spawn(|| Link::connect(&job(0), LONG).expect("connects"));
        let mut strangers = Vec::new();
        while strangers.len() < 100 {
            match TcpStream::connect(("127.0.0.1", job(0).port)) {
                Ok(stranger) => strangers.push(stranger),
                Err(_) => std::thread::sleep(Duration::from_millis(1)),
            }
        }
        let second = scope.spawn(|| Link::connect(&job(1), LONG).expect("connects"));
        std::thread::sleep(Duration::from_millis(300));
        drop(strangers);
        let (first, second) = (first.join().expect("meets"), second.join().expect("meets"));
        std::thread::scope(|scope| {
            scope.spawn(|| first.leave(LONG));
            second.leave(LONG);
        });
    });
}

#[test]
fn a_name_belongs_to_one_list_of_ranks() {
    run(3, |rank, link| {
        let order: &[u32] = if rank == 0 { &[0, 1, 2] } else { &[2, 1, 0] };
        let refused = matches!(link.join("order", order, LONG), Answer::Refused);
        assert!(refused);
        join(&link, "other", &[0, 1, 2]);
        link.leave(LONG);
    });
}

#[test]
fn who_does_not_come_is_named() {
    run(3, |rank, link| {
        let group = join(&link, "all", &[0, 1, 2]);
        if rank != 1 {
            let answer = link.gather(group, &[], Duration::from_millis(200));
            assert!(matches!(answer, Answer::Late(1)));
        } else {
            std::thread::sleep(Duration::from_secs(1));
        }
        link.leave(LONG);
    });
}

#[test]
fn a_broken_connection_ends_every_wait_for_that_rank() {
    run(3, |rank, link| {
        let group = join(&link, "all", &[0, 1, 2]);
        if rank == 2 {
            drop(link);
            return;
        }
        let begin = Instant::now();
        assert!(matches!(link.gather(group, &[], LONG), Answer::Gone(2)));
        assert!(matches!(link.join("later", &[0, 1, 2], LONG), Answer::Gone(2)));
        assert!(begin.elapsed() < LONG / 2);
        assert_eq!(link.lost(&[0, 1, 2]), Some(2));
        join(&link, "both", &[0, 1]);
        link.leave(LONG);
    });
}

#[test]
fn a_rank_that_fails_says_why_and_nobody_waits_for_it() {
    for fails in 0..3 {
        run(3, |rank, link| {
            let group = join(&link, "all", &[0, 1, 2]);
            let begin = Instant::now();
            if rank == fails {
                return link.fail(&"no memory ".repeat(1000));
            }
            assert!(matches!(link.gather(group, &[], LONG), Answer::Gone(gone) if gone == fails));
            assert!(begin.elapsed() < LONG / 2);
            assert_eq!(link.lost(&[0, 1, 2]), Some(fails));
            let error = link.gone(fails, || "not this".to_owned());
            let DeviceError::PeerFailed { rank: told, peer, why } = &error else { panic!("{error}") };
            assert_eq!((*told, *peer, why.len()), (rank, fails, MOST_WORDS));
            assert!(why.starts_with("no memory no memory"));
            let other = (0..3).find(|other| ![rank, fails].contains(other)).expect("one");
            let silent = link.gone(other, || "an exchange".to_owned());
            assert!(matches!(silent, DeviceError::PeerLost { .. }), "{silent}");
            link.leave(LONG);
        });
    }
}

#[test]
fn a_rank_that_comes_after_another_has_failed_is_told_why() {
    for fails in 0..2 {
        let failed = AtomicBool::new(false);
        let came = AtomicBool::new(false);
        let job = place(3);
        let connect = |rank| Link::connect(&job(rank), LONG).expect("connects");
        std::thread::scope(|scope| {
            for rank in 0..2 {
                let (connect, came, failed) = (&connect, &came, &failed);
                scope.spawn(move || {
                    let link = connect(rank);
                    if rank != fails {
                        assert!(
                            matches!(link.join("all", &[0, 1, 2], LONG), Answer::Gone(gone) if gone == fails)
                        );
                        return link.leave(LONG);
                    }
                    failed.store(true, Ordering::SeqCst);
                    link.fail("no memory");
                    assert!(
                        rank != 0 || came.load(Ordering::SeqCst),
                        "the hub has gone before the last rank"
                    );
                });
            }
            while !failed.load(Ordering::SeqCst) {
                std::thread::sleep(Duration::from_millis(1));
            }
            std::thread::sleep(Duration::from_millis(300));
            came.store(true, Ordering::SeqCst);
            let late = connect(2);
            assert!(matches!(late.join("all", &[0, 1, 2], LONG), Answer::Gone(gone) if gone == fails));
            let error = late.gone(fails, || "a join".to_owned());
            assert!(matches!(&error, DeviceError::PeerFailed { why, .. } if why == "no memory"), "{error}");
            late.leave(LONG);
        });
    }
}

#[test]
fn a_rank_without_its_gpu_says_so_to_the_others() {
    for lacks in 0..2 {
        let job = place(2);
        let begin = Instant::now();
        std::thread::scope(|scope| {
            let without = scope.spawn(|| {
                // No machine has so many.
                let options = DeviceOptions { ordinal: Some(1 << 20), ..DeviceOptions::default() };
                CudaDevice::open(&job(lacks), options).expect_err("no GPU").to_string()
            });
            let link = Link::connect(&job(1 - lacks), LONG).expect("connects");
            assert!(matches!(link.join("both", &[0, 1], LONG), Answer::Gone(gone) if gone == lacks));
            let said = link.gone(lacks, || "a join".to_owned());
            let why = without.join().expect("no panic");
            assert!(matches!(&said, DeviceError::PeerFailed { why: told, .. } if *told == why), "{said}");
            link.leave(LONG);
        });
        assert!(begin.elapsed() < LONG / 2);
    }
}

#[test]
fn a_rank_that_has_failed_waits_for_nothing_more() {
    run(2, |rank, link| {
        let group = join(&link, "all", &[0, 1]);
        if rank == 0 {
            return link.leave(LONG);
        }
        let begin = Instant::now();
        link.fail("no memory");
        assert!(matches!(link.gather(group, &[], LONG), Answer::Gone(1)));
        assert!(matches!(link.join("later", &[0, 1], LONG), Answer::Gone(1)));
        link.fail("again");
        link.leave(LONG);
        assert!(begin.elapsed() < Duration::from_secs(2), "{:?}", begin.elapsed());
    });
}

#[test]
fn who_is_late_with_no_word_is_not_told_to_have_gone() {
    run(3, |rank, link| {
        let all = Group { id: join(&link, "all", &[0, 1, 2]), name: "all", ranks: &[0, 1, 2] };
        let error = link.absent(all, "registering `x`".to_owned(), LONG);
        let DeviceError::PeerTimeout { rank: who, missing, what, .. } = &error else { panic!("{error}") };
        assert_eq!((*who, *missing, what.as_str()), (rank, u32::from(rank == 0), "registering `x`"));
        let group = join(&link, "again", &[0, 1, 2]);
        assert!(matches!(link.gather(group, &[], LONG), Answer::Gathered(_)));
        if rank == 2 {
            return link.fail("no memory");
        }
        while link.lost(&[2]).is_none() {
            std::thread::sleep(Duration::from_millis(1));
        }
        let error = link.absent(all, "registering `x`".to_owned(), LONG);
        assert!(matches!(error, DeviceError::PeerFailed { peer: 2, .. }), "{error}");
        link.leave(LONG);
    });
}

#[test]
fn the_end_of_rank_0_is_noticed_by_all() {
    run(3, |rank, link| {
        let group = join(&link, "all", &[0, 1, 2]);
        if rank == 0 {
            return;
        }
        assert!(matches!(link.gather(group, &[], LONG), Answer::Gone(0)));
    });
}

#[test]
fn a_group_given_up_ends_its_waits_and_no_other() {
    run(3, |rank, link| {
        let (all, pair) = (join(&link, "all", &[0, 1, 2]), rank < 2);
        let two = pair.then(|| join(&link, "two", &[0, 1]));
        if rank == 2 {
            link.abort(all, "");
        } else {
            assert!(matches!(link.gather(all, &[], LONG), Answer::Gone(2)));
            let error = link.given_up(Group { id: all, name: "all", ranks: &[0, 1, 2] }).expect("given up");
            assert_eq!(error, DeviceError::Aborted { rank, group: "all".to_owned(), by: 2 });
            let two = two.expect("a member");
            assert_eq!(link.given_up(Group { id: two, name: "two", ranks: &[0, 1] }), None);
            assert!(matches!(link.gather(two, &[], LONG), Answer::Gathered(_)));
        }
        link.leave(LONG);
    });
}

#[test]
fn a_member_that_can_t_make_its_part_of_a_group_ends_the_others_calls_at_once_and_they_say_why() {
    run(3, |rank, link| {
        let group = Group { id: join(&link, "all", &[0, 1, 2]), name: "all", ranks: &[0, 1, 2] };
        let begin = Instant::now();
        if rank == 1 {
            link.abort(group.id, &"no memory ".repeat(1000));
        } else {
            // As in a call of NCCL that waits for rank 1.
            let waits = || std::thread::sleep(LONG);
            assert_eq!(crate::nccl::within(LONG, || link.is_hopeless(group), waits), None);
            let error = link.absent(group, "making a communicator".to_owned(), LONG);
            let DeviceError::PeerFailed { rank: who, peer: 1, why } = &error else { panic!("{error}") };
            assert_eq!(*who, rank);
            assert!(why.starts_with("no memory") && why.len() <= MOST_WORDS, "{}", why.len());
        }
        assert!(begin.elapsed() < LONG / 2, "{:?}", begin.elapsed());
        // The job goes on.
        let group = join(&link, "again", &[0, 1, 2]);
        assert!(matches!(link.gather(group, &[], LONG), Answer::Gathered(_)));
        link.leave(LONG);
    });
}

#[test]
fn a_rank_that_can_t_begin_tells_the_others_why() {
    for declines in 0..2 {
        let job = place(2);
        let begin = Instant::now();
        std::thread::scope(|scope| {
            scope.spawn(|| CudaDevice::decline(&job(declines), LONG, "no such file"));
            let link = Link::connect(&job(1 - declines), LONG).expect("connects");
            assert!(matches!(link.join("both", &[0, 1], LONG), Answer::Gone(gone) if gone == declines));
            let said = link.gone(declines, || "a join".to_owned());
            assert!(matches!(&said, DeviceError::PeerFailed { why, .. } if why == "no such file"), "{said}");
            link.leave(LONG);
        });
        assert!(begin.elapsed() < LONG / 2, "{:?}", begin.elapsed());
    }
}

#[test]
fn a_second_process_with_a_taken_rank_is_refused_and_disturbs_nobody() {
    let job = place(3);
    std::thread::scope(|scope| {
        let zero = scope.spawn(|| Link::connect(&job(0), LONG).expect("connects"));
        let one = Link::connect(&job(1), LONG).expect("connects");
        let zero = zero.join().expect("no panic");
        for _ in 0..3 {
            let error = Link::connect(&job(1), LONG).err().expect("refused").to_string();
            assert!(error.contains("rank 1") && error.contains("RANK"), "{error}");
        }
        let two = Link::connect(&job(2), LONG).expect("is still expected");
        for link in [zero, one, two] {
            scope.spawn(move || {
                let group = join(&link, "all", &[0, 1, 2]);
                assert!(matches!(link.gather(group, &[], LONG), Answer::Gathered(_)));
                assert_eq!(link.lost(&[0, 1, 2]), None);
                link.leave(LONG);
            });
        }
    });
}

#[test]
fn messages_too_long_for_one_exchange_are_an_error_of_all_members_and_the_group_goes_on() {
    run(2, |rank, link| {
        let all = Group { id: join(&link, "all", &[0, 1]), name: "all", ranks: &[0, 1] };
        // Together; and one that can't even be sent.
        for [zero, one] in [[40 << 20, 40 << 20], [0, 70 << 20], [MAX_FRAME, 0]] {
            let mine = vec![7; if rank == 0 { zero } else { one }];
            let error = link.exchange(all, &mine, LONG).expect_err("too long");
            let (bytes, most) = ((zero + one) as u64, MAX_FRAME as u64);
            assert_eq!(error, DeviceError::ExchangeTooLong { rank, group: "all".to_owned(), bytes, most });
        }
        let all = link.exchange(all, &[rank as u8], LONG).expect("goes on");
        assert_eq!(all, [[0], [1]]);
        link.leave(LONG);
    });
}

#[test]
fn who_gave_up_waiting_for_a_group_is_no_part_of_it_until_it_asks_again() {
    let turn = std::sync::Barrier::new(2);
    run(2, |rank, link| {
        let short = Duration::from_millis(200);
        for waits in [0, 1, 0] {
            if rank == waits {
                let answer = link.join("both", &[0, 1], short);
                assert!(matches!(answer, Answer::Late(late) if late == 1 - rank));
            }
            turn.wait();
        }
        let group = join(&link, "both", &[0, 1]);
        let Answer::Gathered(all) = link.gather(group, &[rank as u8], LONG) else { panic!("gathers") };
        assert_eq!(all, [[0], [1]]);
        link.leave(LONG);
    });
}

#[test]
fn an_exchange_of_memory_that_a_member_can_t_make_ends_with_what_that_member_says() {
    for fails in [Link::fail, |link: &Link, why: &str| link.abort(1, why)] {
        run(2, |rank, link| {
            let all = Group { id: join(&link, "all", &[0, 1]), name: "all", ranks: &[0, 1] };
            assert_eq!(all.id, 1);
            if rank == 1 {
                // Its socket is gone before its words are there.
                let gone = crate::handover::Handover::new().expect("listens").invitation;
                link.exchange(all, &gone, LONG).expect("exchanges");
                std::thread::sleep(Duration::from_millis(100));
                return fails(&link, "no memory");
            }
            let file = std::fs::File::open("/dev/null").expect("opens").into();
            let error = crate::handover::between(&link, all, rank, &file, LONG).expect_err("fails");
            let DeviceError::PeerFailed { peer: 1, why, .. } = &error else { panic!("{error}") };
            assert_eq!(why, "no memory");
            link.leave(LONG);
        });
    }
}

#[test]
fn strangers_are_not_let_in_and_disturb_nobody() {
    let port = TcpListener::bind("127.0.0.1:0").expect("binds").local_addr().expect("address").port();
    let job = |rank, secret: &[u8]| Job {
        rank,
        world: 2,
        local_rank: 0,
        address: "127.0.0.1".to_owned(),
        port,
        secret: secret.to_vec(),
    };
    std::thread::scope(|scope| {
        let zero = scope.spawn(|| Link::connect(&job(0, b"right"), LONG).expect("connects"));
        // Garbage, silence, and a wrong secret.
        let mut garbage = loop {
            match TcpStream::connect(("127.0.0.1", port)) {
                Ok(stream) => break stream,
                Err(_) => std::thread::sleep(Duration::from_millis(5)),
            }
        };
        std::io::Write::write_all(&mut garbage, &[7; 500]).expect("writes");
        let _silent = TcpStream::connect(("127.0.0.1", port)).expect("connects");
        let error = Link::connect(&job(1, b"wrong"), LONG).err().expect("refused").to_string();
        assert!(error.contains("secret"), "{error}");
        let one = Link::connect(&job(1, b"right"), LONG).expect("connects");
        let zero = zero.join().expect("no panic");
        let other = scope.spawn(move || {
            let group = join(&zero, "both", &[0, 1]);
            assert!(matches!(zero.gather(group, &[1], LONG), Answer::Gathered(_)));
            zero.leave(LONG);
        });
        let group = join(&one, "both", &[0, 1]);
        assert!(matches!(one.gather(group, &[2], LONG), Answer::Gathered(_)));
        one.leave(LONG);
        other.join().expect("no panic");
    });
}

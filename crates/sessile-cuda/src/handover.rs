//! Descriptors of shared memory, handed to the ranks of the same machine over Unix sockets.
//!
//! Each rank listens under a name that only the group's members learn, and takes a descriptor only from a process of
//! the same user that shows the token which the rank gave to the group for this one exchange.

use std::io::{IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::{Duration, Instant};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg, sockopt::socket_peercred,
};

use sessile_hal::DeviceError;

use crate::link::{Group, Link, random};

/// A member's side of one exchange of descriptors.
pub(crate) struct Handover {
    listener: UnixListener,
    token: [u8; 32],
    /// What the other members must know: to be all-gathered in the group.
    pub(crate) invitation: Vec<u8>,
}

/// Token, then name.
const INVITATION: usize = 32 + 32;

fn address(name: &[u8]) -> std::io::Result<SocketAddr> {
    SocketAddr::from_abstract_name(name)
}

impl Handover {
    pub(crate) fn new() -> std::io::Result<Self> {
        let (token, name) = (random()?, random()?);
        let listener = UnixListener::bind_addr(&address(&name)?)?;
        listener.set_nonblocking(true)?;
        Ok(Handover { listener, token, invitation: [token, name].concat() })
    }

    /// Gives `mine` to every other member and takes theirs, in group order; `None` at this member's own place. Until the
    /// deadline, and as long as it is not `hopeless`.
    pub(crate) fn swap(
        self,
        invitations: &[Vec<u8>],
        member: usize,
        mine: &OwnedFd,
        deadline: Duration,
        hopeless: impl Fn() -> bool,
    ) -> std::io::Result<Vec<Option<OwnedFd>>> {
        let until = Instant::now() + deadline;
        for (peer, invitation) in invitations.iter().enumerate().filter(|(peer, _)| *peer != member) {
            let (token, name) = invitation
                .split_at_checked(32)
                .filter(|_| invitation.len() == INVITATION)
                .ok_or_else(|| std::io::Error::other(format!("member {peer} gave no invitation")))?;
            // The peer listens already, so this returns at once; what is sent waits in the socket.
            let stream = UnixStream::connect_addr(&address(name)?)?;
            give(&stream, token, member, mine)?;
        }
        let mut theirs: Vec<Option<OwnedFd>> = invitations.iter().map(|_| None).collect();
        let mut left = invitations.len().saturating_sub(1);
        while left > 0 {
            match self.listener.accept() {
                Ok((stream, _)) => {
                    if let Some((peer, fd)) = self.take(&stream, until)
                        && peer != member
                        && theirs.get(peer).is_some_and(Option::is_none)
                    {
                        theirs[peer] = Some(fd);
                        left -= 1;
                    }
                }
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                Err(error) => return Err(error),
            }
            if left > 0 && (Instant::now() > until || hopeless()) {
                let peer =
                    (0..theirs.len()).find(|peer| *peer != member && theirs[*peer].is_none()).unwrap_or(0);
                return Err(std::io::Error::new(
                    std::io::ErrorKind::TimedOut,
                    format!("member {peer} handed nothing over"),
                ));
            }
        }
        Ok(theirs)
    }

    /// A descriptor and who sent it; `None` for strangers, whatever they send.
    fn take(&self, stream: &UnixStream, until: Instant) -> Option<(usize, OwnedFd)> {
        if socket_peercred(stream).ok()?.uid != rustix::process::geteuid() {
            return None;
        }
        let left = until
            .saturating_duration_since(Instant::now())
            .clamp(Duration::from_millis(1), Duration::from_secs(2));
        stream.set_nonblocking(false).ok()?;
        stream.set_read_timeout(Some(left)).ok()?;
        let mut message = [0; 40];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let got =
            recvmsg(stream, &mut [IoSliceMut::new(&mut message)], &mut control, RecvFlags::CMSG_CLOEXEC)
                .ok()?;
        let fd = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
            _ => None,
        })?;
        let mut reader = stream;
        reader.read_exact(&mut message[got.bytes..]).ok()?;
        let (token, sender) = message.split_at(32);
        // Every byte is looked at: the time says nothing of where they differ.
        let differs = token.iter().zip(self.token).fold(0, |differs, (a, b)| differs | (a ^ b));
        let sender = u64::from_le_bytes(sender.try_into().ok()?);
        (differs == 0).then_some((usize::try_from(sender).ok()?, fd))
    }
}

/// One exchange between the members of a group, all on this machine: `mine` for what they give, in group order; `None` at
/// this member's own place.
pub(crate) fn between(
    link: &Link,
    group: Group<'_>,
    member: u32,
    mine: &OwnedFd,
    deadline: Duration,
) -> Result<Vec<Option<OwnedFd>>, DeviceError> {
    // A socket that nobody listens at any more is how a member's failure shows here, not what it is.
    let failed = |error: std::io::Error| {
        let what = || format!("an exchange of memory of group `{}`", group.name);
        link.cause_soon(group, what).unwrap_or_else(|| DeviceError::Rendezvous {
            rank: link.rank(),
            address: format!("the members of group `{}` on this machine", group.name),
            why: error.to_string(),
        })
    };
    let hand = Handover::new().map_err(failed)?;
    let invitations = link.exchange(group, &hand.invitation, deadline)?;
    let hopeless = || link.is_hopeless(group);
    hand.swap(&invitations, member as usize, mine, deadline, hopeless).map_err(failed)
}

fn give(stream: &UnixStream, token: &[u8], member: usize, fd: &OwnedFd) -> std::io::Result<()> {
    let message = [token, &(member as u64).to_le_bytes()].concat();
    let fds = [crate::physical::borrow(fd)];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !control.push(SendAncillaryMessage::ScmRights(&fds)) {
        return Err(std::io::Error::other("no room for a descriptor"));
    }
    let sent = sendmsg(stream, &[IoSlice::new(&message)], &mut control, SendFlags::NOSIGNAL)?;
    if sent == message.len() { Ok(()) } else { Err(std::io::Error::other("a short message")) }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Write;
    use std::os::unix::fs::FileExt;

    use super::*;

    const LONG: Duration = Duration::from_secs(20);

    fn file(text: &str) -> OwnedFd {
        let path = std::env::temp_dir().join(format!("sessile-handover-{}-{text}", std::process::id()));
        let mut file =
            File::options().create(true).truncate(true).write(true).read(true).open(&path).expect("opens");
        std::fs::remove_file(&path).expect("removes");
        file.write_all(text.as_bytes()).expect("writes");
        file.into()
    }

    #[test]
    fn every_member_gets_every_others_descriptor_and_strangers_are_passed_over() {
        let hands: Vec<Handover> = (0..3).map(|_| Handover::new().expect("listens")).collect();
        let invitations: Vec<_> = hands.iter().map(|hand| hand.invitation.clone()).collect();
        // A stranger who knows the name but not the token, one who says nothing, and one without a descriptor.
        let name = address(&invitations[0][32..]).expect("name");
        let stranger = UnixStream::connect_addr(&name).expect("connects");
        give(&stranger, &[0; 32], 1, &file("stranger")).expect("sends");
        let _silent = UnixStream::connect_addr(&name).expect("connects");
        let mut bare = UnixStream::connect_addr(&name).expect("connects");
        bare.write_all(&[0; 40]).expect("writes");
        std::thread::scope(|scope| {
            for (member, hand) in hands.into_iter().enumerate() {
                let invitations = &invitations;
                scope.spawn(move || {
                    let mine = file(&member.to_string());
                    let theirs = hand.swap(invitations, member, &mine, LONG, || false).expect("swaps");
                    for (peer, fd) in theirs.into_iter().enumerate() {
                        assert_eq!(fd.is_none(), peer == member);
                        if let Some(fd) = fd {
                            // By position: all descriptors of a file share its place.
                            let mut text = [0];
                            File::from(fd).read_exact_at(&mut text, 0).expect("reads");
                            assert_eq!(text, [b'0' + peer as u8]);
                        }
                    }
                });
            }
        });
    }

    #[test]
    fn a_member_that_hands_nothing_over_is_named() {
        let (ours, absent) = (Handover::new().expect("listens"), Handover::new().expect("listens"));
        let invitations = [ours.invitation.clone(), absent.invitation.clone()];
        let error = ours.swap(&invitations, 0, &file("late"), Duration::from_millis(100), || false);
        let error = error.expect_err("late");
        assert!(error.to_string().contains("member 1"), "{error}");
    }

    #[test]
    fn a_member_that_has_gone_is_not_waited_for() {
        let (ours, absent) = (Handover::new().expect("listens"), Handover::new().expect("listens"));
        let invitations = [ours.invitation.clone(), absent.invitation.clone()];
        let begin = Instant::now();
        ours.swap(&invitations, 0, &file("gone"), LONG, || true).expect_err("hopeless");
        assert!(begin.elapsed() < LONG / 2);
    }
}

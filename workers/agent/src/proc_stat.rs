//! What the kernel says of a process in `/proc/PID/stat` (proc_pid_stat(5)).

/// One process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Stat {
    /// Name of its program, at most 15 bytes.
    pub command: String,
    /// Its state: R, S, D, T, Z and so on.
    pub state: char,
    /// Its parent.
    pub parent: u32,
    /// Its process group.
    pub group: u32,
    /// Its session.
    pub session: u32,
    /// Processor time in user mode and in the kernel, in clock ticks.
    pub ticks: u64,
    /// When it started, in clock ticks after the machine did.
    pub started: u64,
}

impl Stat {
    /// Reads it. None if there is no such process.
    pub fn of(pid: u32) -> Option<Self> {
        Self::parse(&std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
    }

    fn parse(text: &str) -> Option<Self> {
        // The second field may hold spaces and parentheses, and ends with the last of these.
        let (before, after) = text.rsplit_once(')')?;
        let (_, command) = before.split_once('(')?;
        let fields: Vec<&str> = after.split_whitespace().collect();
        // The third field comes first here.
        let number = |field: usize| fields.get(field - 3)?.parse::<u64>().ok();
        let process = |field: usize| u32::try_from(number(field)?).ok();
        Some(Self {
            command: command.to_owned(),
            state: fields.first()?.chars().next()?,
            parent: process(4)?,
            group: process(5)?,
            session: process(6)?,
            ticks: number(14)?.saturating_add(number(15)?),
            started: number(22)?,
        })
    }

    /// It has ended, and nobody has asked for its status yet.
    pub fn is_dead(&self) -> bool {
        matches!(self.state, 'Z' | 'X')
    }

    /// The kernel does not let it run: it is stopped or frozen, or in a call that does not return.
    pub fn is_held(&self) -> bool {
        matches!(self.state, 'T' | 'D')
    }

    /// It is stopped, as by SIGSTOP.
    pub fn is_stopped(&self) -> bool {
        self.state == 'T'
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_may_hold_whatever_it_likes() {
        let text = "17 (a) b (c) D 1 16 15 0 -1 4194304 1 2 3 4 50 7 0 0 20 0 1 0 99 1 2";
        let stat = Stat::parse(text).unwrap();
        assert_eq!(stat.command, "a) b (c");
        assert_eq!((stat.state, stat.parent), ('D', 1));
        assert_eq!((stat.group, stat.session), (16, 15));
        assert_eq!((stat.ticks, stat.started), (57, 99));
        assert_eq!(Stat::parse("17 (a) D 1 16"), None);
    }

    #[test]
    fn this_process_is_found() {
        let own = Stat::of(std::process::id()).unwrap();
        assert!(!own.is_dead() && !own.is_stopped() && own.started > 0);
        assert_eq!(Stat::of(u32::MAX), None);
    }
}

//! Proofs, comparisons and steps back in the simulated cluster.

use fiec_policy::Judged;

use super::*;

fn outputs_of(outputs: &[(&str, &str)]) -> Vec<fiec_schemas::Output> {
    let outputs = outputs.iter().map(|(name, words)| fiec_schemas::Output {
        name: (*name).to_owned(),
        digest: Digest::of(words.as_bytes()),
        bytes: words.len() as u64,
    });
    outputs.collect()
}

impl World {
    /// Commits a boundary with this index and digest as the execution's holder.
    pub fn commit(&mut self, n: u64, index: u64, digest: &str) {
        let author = self.author(n);
        let boundary = self.boundary_event(index, digest);
        self.append(Self::id(n), vec![boundary], &author, true);
    }

    /// Ends the program with this result, which does not count before verification.
    pub fn compute(&mut self, n: u64, capsules: u64, result: &str) {
        let (author, at) = (self.author(n), self.wall());
        let computed = Event::Computed {
            result: result.into(),
            object: None,
            computed_until: at,
            capsules,
            outputs: vec![],
            energy: None,
        };
        self.append(Self::id(n), vec![computed], &author, true);
    }

    /// Commits a boundary that names outputs with the digests of these words.
    pub fn commit_outputs(&mut self, n: u64, index: u64, digest: &str, outputs: &[(&str, &str)]) {
        let Event::Boundary(mut boundary) = self.boundary_event(index, digest) else {
            unreachable!()
        };
        boundary.outputs = outputs_of(outputs);
        let author = self.author(n);
        self.append(Self::id(n), vec![Event::Boundary(boundary)], &author, true);
    }

    /// The verification questions since the last call, with their nodes.
    pub fn questions(&mut self) -> Vec<(NodeId, u64, Segment)> {
        let controls = std::mem::take(&mut self.controls);
        controls
            .into_iter()
            .filter_map(|(node, request)| match request {
                ControlRequest::Verify {
                    question, segment, ..
                } => Some((node, question, segment)),
                _ => None,
            })
            .collect()
    }

    /// A node answers a question with this digest at this boundary.
    pub fn answer(
        &mut self,
        n: u64,
        (node, question): (&NodeId, u64),
        index: u64,
        digest: Digest,
    ) -> Vec<Action> {
        self.answer_outputs(n, (node, question), (index, digest), &[])
    }

    /// A node answers a question and names these outputs as well.
    pub fn answer_outputs(
        &mut self,
        n: u64,
        asked: (&NodeId, u64),
        found: (u64, Digest),
        outputs: &[(&str, &str)],
    ) -> Vec<Action> {
        let verdict = self.verdict(n, asked, found, outputs);
        let actions = self.step(verdict);
        self.carry_out();
        actions
    }

    /// The answer of a node to a question.
    pub fn verdict(
        &self,
        n: u64,
        (node, question): (&NodeId, u64),
        (index, digest): (u64, Digest),
        outputs: &[(&str, &str)],
    ) -> Input {
        let made = outputs_of(outputs).into_iter();
        let verdict = Verdict {
            v: 1,
            question,
            node: node.clone(),
            instance: InstanceId(Uuid::from_u128(1)),
            execution: Self::id(n),
            finding: Some(Finding {
                index,
                digest,
                outputs: made.map(|o| (o.name, o.digest)).collect(),
            }),
            error: None,
            gone: false,
        };
        Input::Verdict {
            verdict: Box::new(verdict),
        }
    }

    /// A node answers that it could not compare.
    pub fn cannot_compare(
        &mut self,
        n: u64,
        (node, question): (&NodeId, u64),
        gone: bool,
    ) -> Vec<Action> {
        let verdict = Verdict {
            v: 1,
            question,
            node: node.clone(),
            instance: InstanceId(Uuid::from_u128(1)),
            execution: Self::id(n),
            finding: None,
            error: Some("cannot be compared".to_owned()),
            gone,
        };
        let actions = self.step(Input::Verdict {
            verdict: Box::new(verdict),
        });
        self.carry_out();
        actions
    }

    /// Performs a step back like the shell.
    pub fn step_back(&mut self, action: &Action) {
        let Action::StepBack {
            execution,
            to: good,
            cause,
            ..
        } = action
        else {
            panic!("no step back: {action:?}")
        };
        let to = match good {
            Good::Known(place) => place.clone(),
            Good::BeforeTheCulprit => None,
        };
        let back = Event::SteppedBack {
            to,
            cause: cause.clone(),
        };
        self.append(*execution, vec![back.clone()], "policy/p", false);
        self.tell_events(*execution, vec![back], true);
        self.act();
    }

    /// Replaces the policy service by one that knows only stored facts: the last message of each
    /// ledger (with these events for execution `n`), the nodes' claims and proofs, and their last
    /// vectors.
    pub fn another_policy(&mut self, n: u64, last: Vec<Event>) {
        let own = InstanceId(Uuid::from_u128(77));
        self.policy = self.trace.policy(&Config::default(), own);
        self.recalls.clear();
        self.controls.clear();
        self.tell_nodes();
        self.tell_events(Self::id(n), last, false);
        self.step(Input::Loaded);
    }

    /// Replaces the policy service by one with pinned keys of nodes, before there is any execution.
    pub fn pin(&mut self, keys: BTreeMap<NodeId, String>) {
        let config = Config {
            node_keys: Some(Arc::new(keys)),
            ..Config::default()
        };
        self.policy = self.trace.policy(&config, InstanceId(Uuid::from_u128(1)));
        self.tell_nodes();
        self.step(Input::Loaded);
    }

    fn tell_nodes(&mut self) {
        for i in 0..self.nodes.len() {
            let d = self.nodes[i].0.clone();
            self.step(Input::Descriptor {
                descriptor: Box::new(d),
            });
            self.prove(i, true);
        }
        self.vectors();
    }

    /// A boundary event with σ only.
    pub fn boundary_event(&self, index: u64, digest: &str) -> Event {
        let at = self.wall();
        Event::Boundary(BoundaryEvent {
            index,
            digest: Digest::of(digest.as_bytes()),
            bytes: 8,
            computed_at: at,
            compute_us: 1,
            ..serde_json::from_value(serde_json::json!({
                "index": 0, "digest": Digest::of(b""), "bytes": 0, "computed_at": at,
                "compute_us": 0,
            }))
            .unwrap()
        })
    }

    /// Answers how far executions were verified, like the shell.
    pub(super) fn answer_recalls(&mut self) {
        for execution in std::mem::take(&mut self.recalls) {
            let up_to = match self.hide_verified {
                false => Ok(self.verified.get(&execution).cloned()),
                true => Err("it cannot be read".to_owned()),
            };
            let named = self.named.get(&execution).cloned().unwrap_or_default();
            self.step(Input::Recalled {
                execution,
                up_to: up_to.into(),
                named,
            });
        }
    }

    /// Stores the contracts that a node has lost.
    pub fn lose(&mut self, node: usize, lost: Quarantine) -> Vec<Action> {
        let name = self.node(node);
        self.step(Input::Quarantine {
            node: name.clone(),
            quarantine: lost,
        })
    }

    /// Adds a node.
    pub fn join(&mut self) -> NodeId {
        let i = self.nodes.len();
        let d = descriptor(i, 900 + i as u128);
        self.nodes.push((d.clone(), 0.2, 0, true));
        let name = d.node.clone();
        self.step(Input::Descriptor {
            descriptor: Box::new(d),
        });
        self.prove(i, true);
        self.vectors();
        name
    }

    /// A node sends the proof of its canaries, checked by the shell.
    pub fn prove(&mut self, node: usize, passed: bool) -> Vec<Action> {
        let d = self.nodes[node].0.clone();
        let at = self.wall();
        let expires = Timestamp::from_micros(4_000_000_000_000_000);
        let mut proof = Proof::passing(&d, 1, at, expires);
        for result in &mut proof.results {
            let broken = !passed && result.contract == Contract::Bitwise;
            result.passed = !broken;
            result.detail = if broken { "canary dot is off" } else { "" }.to_owned();
        }
        let signed = SignedProof {
            v: 1,
            statement: serde_json::to_string(&proof).unwrap(),
            key: "U".into(),
            sig: String::new(),
        };
        self.step(Input::Proof {
            node: d.node.clone(),
            signed: Box::new(signed),
            judged: Judged::Counts(proof),
        })
    }
}

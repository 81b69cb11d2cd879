//! Divides the groups that matter, and removes those that do not.

use super::{
    features::{USES, count, group_by},
    held_memory::HeldMemory,
    messages::Messages,
    relaxation::{ClassConfigs, Group, Relaxation},
};
use std::sync::Arc;

/// The most groups of a class: the size of tables is the square of it.
const MOST_GROUPS: usize = 800;
/// A group is divided by all uses of a class of axes into at most so many.
const MOST_PARTS: usize = 24;
/// Each round divides one in so many groups, and at least a given number.
const DIVIDED_SHARE: usize = 8;

impl Relaxation {
    /// Per class and group: the least slack of all variables.
    pub fn least_slack(&self, slack: &[(u32, Vec<i64>)]) -> Vec<Vec<i64>> {
        let mut least: Vec<Vec<i64>> =
            self.classes.iter().map(|class| vec![i64::MAX; class.groups.len()]).collect();
        for (variable, own) in slack {
            let class = self.of[*variable as usize];
            least[class as usize].iter_mut().zip(own).for_each(|(least, own)| *least = (*least).min(*own));
        }
        least
    }

    /// Per class: the cheapest config of each of the groups of least slack.
    pub fn nearest(&self, least: &[Vec<i64>], groups: usize) -> Vec<Vec<u32>> {
        let of_class = |(class, least): (&ClassConfigs, &Vec<i64>)| {
            let mut order: Vec<usize> = (0..least.len()).collect();
            order.sort_by_key(|&group| least[group]);
            order.truncate(groups);
            let cheapest = |group: &Group| {
                let all = group.configs.iter().zip(&group.costs);
                all.min_by_key(|(_, cost)| **cost).map(|(config, _)| *config)
            };
            order.into_iter().filter_map(|group| cheapest(&class.groups[group])).collect()
        };
        self.classes.iter().zip(least).map(of_class).collect()
    }

    /// Removes the configs that alone cost so much more than the best of their group that the slack is more than `most`.
    fn remove_configs(&mut self, least: &[Vec<i64>], most: i64) {
        if self.memory.as_ref().is_some_and(HeldMemory::has_prices) {
            return;
        }
        for (class, least) in self.classes.iter_mut().zip(least) {
            for (group, slack) in
                class.groups.iter_mut().zip(least).filter(|(group, _)| group.configs.len() > 1)
            {
                let best = group.costs.iter().copied().min().unwrap_or(0);
                let spare = best.saturating_add(most.saturating_sub(*slack));
                let costs = std::mem::take(&mut group.costs);
                let mut own = costs.iter();
                group.configs.retain(|_| own.next().is_some_and(|cost| *cost <= spare));
                group.costs = costs.into_iter().filter(|cost| *cost <= spare).collect();
            }
        }
    }

    /// Removes the groups of more than this slack. False where a class has no other: then every assignment has more.
    /// `used` loses the same groups as `least`.
    pub fn remove(
        &mut self,
        least: &mut [Vec<i64>],
        most: i64,
        used: &mut [Vec<i64>],
        messages: &mut Messages,
    ) -> bool {
        let kept = |own: &Vec<i64>| -> Vec<u32> {
            (0..own.len() as u32).filter(|&group| own[group as usize] <= most).collect()
        };
        let kept: Vec<Vec<u32>> = least.iter().map(kept).collect();
        let is_whole = |class: u32| kept[class as usize].len() == least[class as usize].len();
        self.remove_configs(least, most);
        if (0..kept.len() as u32).all(is_whole) {
            return true;
        }
        if kept.iter().any(Vec::is_empty) {
            return false;
        }
        for kind in &mut self.kinds {
            let [from, to] = [kind.from, kind.to].map(|end| self.ends[end as usize].class);
            if is_whole(from) && is_whole(to) {
                continue;
            }
            let (rows, columns) = (&kept[from as usize], &kept[to as usize]);
            let cells = rows.iter().flat_map(|row| {
                let row = &kind.table[*row as usize * kind.columns..][..kind.columns];
                columns.iter().map(|&column| row[column as usize])
            });
            (kind.table, kind.columns) = (cells.collect(), columns.len());
        }
        for end in self.ends.iter_mut().filter(|end| !is_whole(end.class)) {
            let kept = &kept[end.class as usize];
            end.sets = kept.iter().map(|&at| std::mem::take(&mut end.sets[at as usize])).collect();
            if end.is_source {
                end.times = kept.iter().map(|&at| Arc::clone(&end.times[at as usize])).collect();
            }
        }
        messages.retain(&self.pairs, |variable| &kept[self.of[variable as usize] as usize]);
        for (class, own) in (0..).zip(&mut self.classes).filter(|(class, _)| !is_whole(*class)) {
            let is_kept: Vec<bool> = least[class as usize].iter().map(|slack| *slack <= most).collect();
            let mut flags = is_kept.iter();
            own.groups.retain(|_| *flags.next().unwrap_or(&true));
            own.is_changed = true;
        }
        for own in least.iter_mut().chain(used).zip(kept.iter().cycle()) {
            let (slack, kept) = own;
            *slack = kept.iter().map(|&at| slack[at as usize]).collect();
        }
        true
    }

    /// Divides the groups of least slack, and gives their messages to the parts. `least`: per class and group, its slack. False where none
    /// of more than one config has a slack of at most `most`.
    pub fn divide(&mut self, least: &[Vec<i64>], most: i64, number: usize, messages: &mut Messages) -> bool {
        let mut all = 0;
        let mut due: Vec<(i64, u32, u32)> = Vec::new();
        for (at, (class, least)) in self.classes.iter().zip(least).enumerate() {
            all += class.groups.len();
            for (own, (group, &slack)) in class.groups.iter().zip(least).enumerate() {
                if group.configs.len() > 1 && slack <= most && class.groups.len() < MOST_GROUPS {
                    due.push((slack, at as u32, own as u32));
                }
            }
        }
        due.sort_unstable();
        due.truncate(number.max(all / DIVIDED_SHARE));
        let mut parents: Vec<Vec<u32>> = vec![Vec::new(); self.classes.len()];
        let mut divided = false;
        for (_, at, group) in due {
            let class = &mut self.classes[at as usize];
            let members = &class.groups[group as usize].configs;
            // By the uses of the first class of axes in which the configs differ; by one of these uses where that makes many groups.
            let differ = |at: &usize| {
                let first = class.features[members[0] as usize][*at];
                members.iter().any(|&m| class.features[m as usize][*at] != first)
            };
            let axes = class.features[members[0] as usize].len();
            let Some(axis) = (0..axes).find(differ) else { continue };
            let counts = |config: u32| class.features[config as usize][axis];
            let mut parts = group_by(members, counts);
            if parts.len() > MOST_PARTS {
                let own = |used: usize| members.iter().map(move |&own| count(counts(own), used));
                let most_spread = (0..USES).max_by_key(|&used| spread(own(used))).unwrap_or(0);
                parts = group_by(members, |config| count(counts(config), most_spread));
            }
            (divided, class.is_changed) = (true, true);
            // The first part takes the group's place: all other groups keep their numbers.
            let mut parts = parts.into_iter().map(Group::of);
            if let Some(first) = parts.next() {
                class.groups[group as usize] = first;
            }
            let before = class.groups.len();
            class.groups.extend(parts);
            parents[at as usize].extend(vec![group; class.groups.len() - before]);
        }
        messages.extend(&self.pairs, |variable| &parents[self.of[variable as usize] as usize]);
        divided
    }
}

/// How far the largest of some numbers is from the least.
fn spread(numbers: impl Iterator<Item = u128>) -> u128 {
    let (least, most) = numbers.fold((u128::MAX, 0), |(least, most), own| (own.min(least), own.max(most)));
    most.saturating_sub(least)
}

//! A bounded concurrent map, for results that are cheap to compute again.

use rustc_hash::{FxHashMap, FxHasher};
use std::hash::{Hash, Hasher};
use std::sync::RwLock;

/// Locks per cache.
const PARTS: usize = 16;

/// A map in parts with one lock each, so that threads seldom wait for each other. A poisoned lock counts as a miss.
#[derive(Debug)]
pub(crate) struct Cache<K, V> {
    parts: Vec<RwLock<FxHashMap<K, V>>>,
    /// A part that reaches this number of entries is emptied.
    limit: usize,
}

impl<K: Hash + Eq, V: Clone> Cache<K, V> {
    pub(crate) fn new(limit: usize) -> Cache<K, V> {
        Cache { parts: (0..PARTS).map(|_| RwLock::default()).collect(), limit: limit / PARTS }
    }

    fn part(&self, key: &K) -> &RwLock<FxHashMap<K, V>> {
        let mut hasher = FxHasher::default();
        key.hash(&mut hasher);
        &self.parts[(hasher.finish() >> 56) as usize % PARTS]
    }

    pub(crate) fn get(&self, key: &K) -> Option<V> {
        self.part(key).read().ok()?.get(key).cloned()
    }

    pub(crate) fn insert(&self, key: K, value: V) {
        if let Ok(mut map) = self.part(&key).write() {
            if map.len() >= self.limit {
                map.clear();
            }
            map.insert(key, value);
        }
    }

    /// The cached value, or the result of `make`, which is then cached.
    pub(crate) fn get_or<E>(&self, key: K, make: impl FnOnce() -> Result<V, E>) -> Result<V, E> {
        if let Some(value) = self.get(&key) {
            return Ok(value);
        }
        let value = make()?;
        self.insert(key, value.clone());
        Ok(value)
    }
}

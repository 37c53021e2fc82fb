#!/bin/sh
# Makes this machine a node of a cluster, and starts the training on the first one. cloud-init installs it as a service.
#
# The nodes find one another through the shared file system: each leaves its address and its public host key there.
# Node 0 makes a key for ssh, whose private half never leaves it, and starts `paceline launch` once all are there.
# Variables come from /etc/paceline/node.env; cloud-init.yaml.tftpl lists them.
set -eu

state=${STATE:-/etc/paceline}
host_key=${HOST_KEY:-/etc/ssh/ssh_host_ed25519_key.pub}
meeting=$SHARED/.nodes
look_s=${LOOK_S:-5}
wait_s=${WAIT_S:-1800}

say() {
    echo "paceline-node: node $NODE_INDEX of $CLUSTER_SIZE: $*" >&2
}

as_user() {
    if [ "$(id -un)" = "$TRAIN_USER" ]; then "$@"; else runuser -u "$TRAIN_USER" -- "$@"; fi
}

wait_for() { # FILE: until it is there
    waited=0
    while [ ! -s "$1" ]; do
        if [ "$waited" -ge "$wait_s" ]; then
            say "$1 is not there after $wait_s s: that node did not start, or does not see the shared file system"
            exit 1
        fi
        sleep "$look_s"
        waited=$((waited + look_s))
    done
}

mount_shared() {
    if [ -n "${MOUNT_SOURCE:-}" ] && ! mountpoint -q "$SHARED"; then
        mkdir -p "$SHARED"
        # shellcheck disable=SC2086  # several options in one variable
        mount ${MOUNT_OPTIONS:-} "$MOUNT_SOURCE" "$SHARED"
    fi
    mkdir -p "$meeting" "$SHARED/runs"
    chown "$TRAIN_USER" "$SHARED/runs"
}

install_paceline() {
    if [ -x "$VENV/bin/paceline" ]; then return; fi
    say "installing $SOURCE_URL at $SOURCE_REF"
    git clone --quiet --branch "$SOURCE_REF" --depth 1 "$SOURCE_URL" "$WORKDIR"
    python3 -m venv "$VENV"
    "$VENV/bin/pip" install --quiet -c "$WORKDIR/constraints.txt" "$WORKDIR"
    chown -R "$TRAIN_USER" "$WORKDIR"
}

user_home() {
    getent passwd "$TRAIN_USER" | cut -d: -f6
}

trust_first_node() { # lets node 0 come by ssh
    keys=$(user_home)/.ssh
    as_user mkdir -p -m 700 "$keys"
    if [ "$NODE_INDEX" -eq 0 ]; then
        if [ ! -e "$keys/id_ed25519" ]; then
            as_user ssh-keygen -q -t ed25519 -N "" -C paceline -f "$keys/id_ed25519"
        fi
        cp "$keys/id_ed25519.pub" "$meeting/.first.pub"
        mv "$meeting/.first.pub" "$meeting/first.pub" # whole, or not there
    fi
    wait_for "$meeting/first.pub"
    key=$(cat "$meeting/first.pub")
    if ! grep -qsF "$key" "$keys/authorized_keys"; then
        echo "$key" | as_user tee -a "$keys/authorized_keys" >/dev/null
        as_user chmod 600 "$keys/authorized_keys"
    fi
}

register() { # this node's address and host key, for the others to see
    address=${ADDRESS:-$(hostname -I | cut -d' ' -f1)}
    echo "$address $(cut -d' ' -f1,2 "$host_key")" >"$meeting/.node-$NODE_INDEX"
    mv "$meeting/.node-$NODE_INDEX" "$meeting/node-$NODE_INDEX"
    say "is at $address"
}

gather_nodes() { # writes the file of hosts, and whom ssh may believe
    : >"$state/hosts"
    : >"$state/known_hosts"
    index=0
    while [ "$index" -lt "$CLUSTER_SIZE" ]; do
        wait_for "$meeting/node-$index"
        cut -d' ' -f1 "$meeting/node-$index" >>"$state/hosts"
        cat "$meeting/node-$index" >>"$state/known_hosts"
        index=$((index + 1))
    done
    as_user tee "$(user_home)/.ssh/known_hosts" <"$state/known_hosts" >/dev/null
    say "all nodes are there: $(tr '\n' ' ' <"$state/hosts")"
}

train() {
    cd "$WORKDIR"
    set -- launch "$CONFIG" "train.epochs=$TRAINING_EPOCHS" "checkpoint.every_epochs=$SAVE_FREQUENCY" \
        "monitor.folder=$SHARED/runs" --gpus-per-node "$GPUS_PER_NODE"
    if [ "$CLUSTER_SIZE" -gt 1 ]; then
        set -- "$@" --on ssh --hostfile "$state/hosts" --python "$VENV/bin/python"
    else
        set -- "$@" --on local
    fi
    for found in "$SHARED"/runs/*/config.yaml; do
        if [ -e "$found" ]; then set -- "$@" --resume && break; fi
    done
    if [ "$(id -un)" = "$TRAIN_USER" ]; then exec "$VENV/bin/paceline" "$@"; fi
    exec runuser -u "$TRAIN_USER" -- "$VENV/bin/paceline" "$@"
}

mount_shared
install_paceline
trust_first_node
register
if [ "$NODE_INDEX" -eq 0 ]; then
    gather_nodes
    train
fi

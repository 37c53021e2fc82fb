#!/bin/sh
# Makes this machine a node of a cluster, and starts the training on the first one. cloud-init installs it as a service.
#
# The nodes find one another through the shared file system: each leaves its address and its public host key there.
# Node 0 makes a key for ssh, whose private half never leaves it, and starts `paceline launch` once all are there.
# Every step may be repeated: a step that was interrupted begins anew, one that is done changes nothing.
# Variables come from /etc/paceline/node.env; cloud-init.yaml.tftpl lists them. Exit code 2: a start would not help.
set -eu

state=${STATE:-/etc/paceline}
host_key=${HOST_KEY:-/etc/ssh/ssh_host_ed25519_key.pub}
meeting=$SHARED/.nodes
look_s=${LOOK_S:-5}
wait_s=${WAIT_S:-1800}

say() {
    echo "paceline-node: node $NODE_INDEX of $CLUSTER_SIZE: $*" >&2
}

refuse() { # WHAT: ends the service for good
    say "$*"
    exit 2
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

check_python() {
    if ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        refuse "python3 is $(python3 -V 2>&1): Paceline needs 3.11 or newer; choose an image of Ubuntu 24.04 or Debian 12"
    fi
}

install_lustre() { # AWS's own client, for the kernel that runs
    if command -v mount.lustre >/dev/null; then return; fi
    say "installing the Lustre client for kernel $(uname -r)"
    keys=https://fsx-lustre-client-repo-public-keys.s3.amazonaws.com
    curl -fsS --create-dirs -o /etc/apt/keyrings/fsx.asc "$keys/fsx-ubuntu-public-key.asc"
    # shellcheck source=/dev/null
    release=$(. /etc/os-release && echo "$VERSION_CODENAME")
    echo "deb [signed-by=/etc/apt/keyrings/fsx.asc] https://fsx-lustre-client-repo.s3.amazonaws.com/ubuntu $release main" \
        >/etc/apt/sources.list.d/fsx.list
    apt-get update -q
    DEBIAN_FRONTEND=noninteractive apt-get install -y -q "lustre-client-modules-$(uname -r)"
}

mount_shared() {
    if [ -n "${MOUNT_SOURCE:-}" ] && ! mountpoint -q "$SHARED"; then
        case ${MOUNT_OPTIONS:-} in "-t lustre"*) install_lustre ;; esac
        mkdir -p "$SHARED"
        # shellcheck disable=SC2086  # several options in one variable
        mount ${MOUNT_OPTIONS:-} "$MOUNT_SOURCE" "$SHARED"
    fi
    mkdir -p "$meeting" "$SHARED/runs"
    chown "$TRAIN_USER" "$SHARED/runs"
}

# NCCL inside torch's wheels finds a plugin by the linker's cache, and reads /etc/nccl.conf in every process, however it
# was started. NCCL_NET names the network: without its plugin NCCL then fails, in the place of slow TCP in silence.
set_up_network() {
    case ${NETWORK:-tcp} in
    efa)
        plugin=$(find /opt/amazon/ofi-nccl /opt/aws-ofi-nccl -name 'libnccl-net*.so' 2>/dev/null | head -n 1)
        if [ -z "$plugin" ]; then
            refuse "the image has no aws-ofi-nccl in /opt: NCCL would not use EFA; choose AWS's Deep Learning Base image"
        fi
        printf '%s\n' "$(dirname "$plugin")" /opt/amazon/efa/lib >/etc/ld.so.conf.d/paceline-nccl.conf
        echo "NCCL_NET=AWS Libfabric" >/etc/nccl.conf
        ;;
    gib)
        if [ ! -e /usr/local/gib/lib64/libnccl-net.so ]; then install_gib; fi
        echo /usr/local/gib/lib64 >/etc/ld.so.conf.d/paceline-nccl.conf
        # Google's settings for this machine type, which come with the plugin.
        env -i PATH="$PATH" bash -c '. /usr/local/gib/scripts/set_nccl_env.sh >/dev/null; env' |
            grep '^NCCL_' >/etc/nccl.conf
        ;;
    *) return ;;
    esac
    ldconfig
    say "NCCL uses $NETWORK: $(tr '\n' ' ' </etc/nccl.conf)"
}

install_gib() {
    say "installing Google's NCCL plugin (nccl-gib)"
    curl -fsS --create-dirs -o /etc/apt/keyrings/google.asc https://packages.cloud.google.com/apt/doc/apt-key.gpg
    echo "deb [signed-by=/etc/apt/keyrings/google.asc] https://packages.cloud.google.com/apt gpudirect-gib-apt main" \
        >/etc/apt/sources.list.d/nccl-gib.list
    apt-get update -q
    DEBIAN_FRONTEND=noninteractive apt-get install -y -q nccl-gib
}

install_paceline() {
    wanted="$SOURCE_URL $SOURCE_REF"
    if [ "$(cat "$VENV/installed" 2>/dev/null)" = "$wanted" ]; then return; fi
    say "installing $SOURCE_URL at $SOURCE_REF"
    rm -rf "$WORKDIR" "$VENV"
    git clone --quiet --branch "$SOURCE_REF" --depth 1 "$SOURCE_URL" "$WORKDIR"
    python3 -m venv "$VENV"
    "$VENV/bin/pip" install --quiet -c "$WORKDIR/constraints.txt" "$WORKDIR"
    chown -R "$TRAIN_USER" "$WORKDIR"
    echo "$wanted" >"$VENV/installed" # last: without it the next start begins anew
}

user_home() {
    getent passwd "$TRAIN_USER" | cut -d: -f6
}

make_key() { # on node 0, whose public half the others take
    keys=$(user_home)/.ssh
    as_user mkdir -p -m 700 "$keys"
    if [ ! -e "$keys/id_ed25519" ]; then
        as_user ssh-keygen -q -t ed25519 -N "" -C paceline -f "$keys/id_ed25519"
    fi
    cp "$keys/id_ed25519.pub" "$meeting/.first.pub"
    mv "$meeting/.first.pub" "$meeting/first.pub" # whole, or not there
}

trust_first_node() { # lets node 0 come by ssh; the key of one that was replaced goes
    keys=$(user_home)/.ssh
    as_user mkdir -p -m 700 "$keys"
    wait_for "$meeting/first.pub"
    key=$(cat "$meeting/first.pub")
    if ! grep -qsxF "$key" "$keys/authorized_keys"; then
        others=$(grep -sv ' paceline$' "$keys/authorized_keys" || true)
        printf '%s\n' ${others:+"$others"} "$key" | as_user tee "$keys/authorized_keys" >/dev/null
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

check_python
mount_shared
set_up_network
install_paceline
if [ "$NODE_INDEX" -eq 0 ]; then make_key; fi
trust_first_node
register
if [ "$NODE_INDEX" -eq 0 ]; then
    gather_nodes
    train
fi
while sleep "$look_s"; do trust_first_node; done # as long as the node lives: node 0 may be replaced
